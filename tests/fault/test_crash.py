"""Training runs that end badly at random moments: what was logged a second before is there, and said to be."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import signal
from pathlib import Path

import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.runlog.verify import verify
from tests.support.processes import Finished, finish, record_command, script, start

#: Trains until a timer ends it: some time after twenty steps and the first rows on the disk, between two bytecodes.
DOOMED = """
import os, pathlib, signal, sys, time
import training

death, delay, run = sys.argv[1], float(sys.argv[2]), pathlib.Path(sys.argv[3])
logging, done = False, 0
progress = os.open(f"{death}.progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def doom(number, frame):
    global logging
    if not logging:
        logging = done >= 20 and any(file.stat().st_size for file in run.glob("rank-*/tensors-*.open"))
        return signal.setitimer(signal.ITIMER_REAL, delay if logging else 0.1)
    os.write(progress, f"died {time.time()}\\n".encode())
    if death == "kill" or death == "both":
        os.kill(os.getppid() if death == "both" else os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif death == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif death == "exit":
        os._exit(7)
    elif death == "exception":
        raise RuntimeError("not ours")
    elif death == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif death == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
        raise SystemExit(0)


def after_step(step):
    global done
    done = step + 1
    os.write(progress, f"{step} {time.time()}\\n".encode())
    time.sleep(0.01)


signal.signal(signal.SIGALRM, doom)
signal.setitimer(signal.ITIMER_REAL, 0.1)
training.train(100_000, after_step=after_step)
"""
STATUS = {
    "kill": 128 + signal.SIGKILL,
    "terminate": 128 + signal.SIGTERM,
    "exit": 7,
    "exception": 1,
    "interrupt": 128 + signal.SIGINT,
    "both": -signal.SIGKILL,
    "parent": -signal.SIGKILL,
}
#: The process had the chance to close its log.
CLOSED = {"exception", "interrupt", "parent"}
#: There was nobody left to seal what the process had open.
UNSEALED = {"both"}


@dataclasses.dataclass(frozen=True)
class Death:
    way: str
    run: Finished
    finished: dict[int, float]
    """When each step ended, by the script's own account."""
    died: float

    @property
    def owed(self) -> list[int]:
        """Steps that ended more than a second before."""
        return [step for step, time in self.finished.items() if time < self.died - 1.0]


#: Of these, too, `make slow` alone says that they end like the others.
SLOW = {"terminate", "exit", "interrupt"}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory, request) -> dict[str, Death]:
    folder = tmp_path_factory.mktemp("crash")
    script(folder, "doomed.py", DOOMED)
    moments = random.Random(20)

    def die(way: str, delay: float) -> Death:
        run = folder / way
        process = start(folder, record_command(run, "--every", "1", "doomed.py", way, str(delay), str(run)))
        finished = finish(process, run)
        steps, died = {}, 0.0
        for line in (folder / f"{way}.progress").read_text().splitlines():
            what, _, time = line.partition(" ")
            if what == "died":
                died = float(time)
            else:
                steps[int(what)] = float(time)
        return Death(way, finished, steps, died)

    asked = {item.callspec.params.get("death") for item in request.session.items if hasattr(item, "callspec")}
    delays = {way: moments.uniform(1.5, 2.5) for way in STATUS if way in asked}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(delays, pool.map(die, delays, delays.values()), strict=True))


@pytest.fixture(params=[pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in STATUS])
def death(request, deaths) -> Death:
    return deaths[request.param]


def test_the_status_is_what_a_shell_would_report(death):
    assert death.run.status == STATUS[death.way], death.run.err
    assert b"precdoctor" not in death.run.out
    if death.way == "exception":
        assert "RuntimeError: not ours" in death.run.err
    if death.way == "interrupt":
        assert "KeyboardInterrupt" in death.run.err


def test_every_step_that_ended_a_second_before_is_there_with_its_tensors(death):
    run = precdoctor.open_run(death.run.run)
    steps, tensors = run.steps(), run.tensors(columns=["step", "kind", "amax"])
    assert len(death.owed) >= 20
    complete = sorted(steps[steps["complete"]]["step"])
    assert complete == list(range(len(complete)))  # none is missing in between
    assert set(death.owed) <= set(complete)
    kinds = tensors[tensors["step"].isin(death.owed)].groupby("step")["kind"].agg(set)
    assert len(kinds) == len(death.owed)
    assert all({"output", "grad_output", "weight", "weight_grad", "loss"} <= kind for kind in kinds)
    if death.way in CLOSED:
        assert set(death.finished) <= set(complete)  # the last ones, too


def test_a_step_the_run_died_in_is_marked(deaths):
    steps = precdoctor.open_run(deaths["exception"].run.run).steps()
    unfinished = steps[~steps["complete"]]
    assert len(unfinished) <= 1
    assert set(unfinished["step"]) <= {steps["step"].max()}


def test_verify_trusts_what_is_there_and_names_what_is_not(death, capsys):
    verification = verify(death.run.run)
    assert verification.ok, verification.problems
    (rank,) = verification.ranks
    assert rank.clean_close == (death.way in CLOSED)
    assert not rank.live
    assert bool(rank.streams) == (death.way in UNSEALED)
    assert main(["log", "verify", str(death.run.run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("killed" in said or "did not close" in said) == (death.way not in CLOSED), said


def test_the_parent_seals_and_says_what_to_type(death):
    opened = list(Path(death.run.run).glob("rank-*/*.open"))
    if death.way in UNSEALED:
        assert opened
    else:
        assert opened == []
    if STATUS[death.way] >= 0:
        assert death.run.said == [f"recorded 1 process in {death.way}; next, type:"]
        assert death.run.err.endswith(f"  precdoctor diagnose {death.way}\n")


def test_diagnose_still_answers(death):
    diagnosis = precdoctor.diagnose(precdoctor.open_run(death.run.run))
    assert not [f for f in diagnosis.findings if f.severity == "error"]


def test_the_dead_leave_no_temporary_files(death):
    if death.way not in UNSEALED:
        assert [path for path in death.run.ranks["rank-00000"].iterdir() if path.suffix == ".tmp"] == []
