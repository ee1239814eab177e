"""The recorder in trouble: training goes on, bit for bit, with one line of warning, and the log says what happened."""

from __future__ import annotations

import concurrent.futures
import json

import pytest

import precdoctor
from precdoctor.runlog.verify import verify
from tests.support.processes import Finished, finish, record_command, script, start, warm

#: One obstacle, then a training run that must not notice.
OBSTACLES = """
import os, pathlib, resource, shutil, signal, sys
import training

obstacle, run = sys.argv[1], pathlib.Path(sys.argv[2])


def fails(*args, **kwargs):
    raise ZeroDivisionError("ours")


def at(step, action):
    return lambda now: action() if now == step else None


def in_the_way(path):
    path.rename(path.with_name("elsewhere"))
    path.touch()


def measure_once():
    from precdoctor.recording.recorder import Recorder

    original = Recorder.measure

    def measure(*args, **kwargs):
        Recorder.measure = original
        fails()

    Recorder.measure = measure


def break_measuring():
    from precdoctor.recording.recorder import Recorder

    Recorder.measure = fails


def break_beginning():
    from precdoctor.recording import recorder

    recorder.Facts = fails


def break_writing():
    from precdoctor.recording.output import drain

    drain.step_row = fails


class Stop(Exception):
    pass


def stop(number, frame):
    raise Stop


def signal_inside_a_hook():
    from precdoctor.recording.recorder import Recorder

    Recorder.measure = lambda *args, **kwargs: signal.raise_signal(signal.SIGUSR1)


after_step = lambda step: None
if obstacle == "file_size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
elif obstacle == "vanished":
    after_step = at(10, lambda: shutil.rmtree(run))
elif obstacle == "file_for_run_directory":
    in_the_way(run)
elif obstacle == "beginning":
    break_beginning()
elif obstacle == "hook_once":
    after_step = at(10, measure_once)
elif obstacle in {"hook", "strict"}:
    after_step = at(10, break_measuring)
elif obstacle == "no_stderr":
    sys.stderr = None
    after_step = at(10, break_measuring)
elif obstacle in {"writing", "writing_strict"}:
    after_step = at(10, break_writing)
elif obstacle == "signal":
    signal.signal(signal.SIGUSR1, stop)
    after_step = at(10, signal_inside_a_hook)

try:
    print(training.digest(training.train(40, after_step=after_step)))
except Stop:
    print("stopped by its own signal handler")
"""
FLAGS = {"max_disk": ["--max-disk", "100kB"], "strict": ["--strict"], "writing_strict": ["--strict"]}
#: Training runs to its end; for each the one line said while it does, and how the launcher's line begins.
WARNINGS = {
    "none": ([], "recorded 1 process in none; next"),
    "file_size": (
        ["the log cannot be written (File too large); recording has stopped, training goes on"],
        "recorded 1 process in file_size (until it stopped early: the log cannot be written (File too large)); next",
    ),
    "max_disk": (
        ["the log has reached --max-disk (100000 bytes); tensors are no longer recorded, training goes on"],
        "recorded 1 process in max_disk",
    ),
    "vanished": (
        ["the log cannot be written (No such file or directory); recording has stopped, training goes on"],
        "the run directory vanished is gone, and with it what was recorded",
    ),
    "file_for_run_directory": (
        ["the run directory cannot be written (Not a directory); training goes on unrecorded"],
        "the run directory file_for_run_directory is gone, and with it what was recorded",
    ),
    "beginning": (["internal error, training is not affected: ZeroDivisionError: ours"], "nothing was recorded"),
    "hook_once": (
        ["internal error, training is not affected: ZeroDivisionError: ours"],
        "recorded 1 process in hook_once; next",
    ),
    "hook": (
        ["internal error, training is not affected: ZeroDivisionError: ours"],
        "recorded 1 process in hook (until it stopped early: 3 internal errors, the last one ZeroDivisionError: ours)",
    ),
    "no_stderr": ([], "recorded 1 process in no_stderr (until it stopped early: 3 internal errors"),
    "writing": (
        ["internal error while writing the log (ZeroDivisionError: ours)"],
        "recorded 1 process in writing (until it stopped early: internal error while writing the log",
    ),
}
OTHERS = ("strict", "writing_strict", "signal")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("obstacles")
    script(folder, "train.py", OBSTACLES)

    def run(obstacle: str) -> Finished:
        directory = folder / obstacle
        command = record_command(directory, *FLAGS.get(obstacle, []), "--", *warm("train.py", obstacle, directory))
        return finish(start(folder, command), directory)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        names = [*WARNINGS, *OTHERS]
        found = dict(zip(names, pool.map(run, names), strict=True))
    found["unrecorded"] = finish(start(folder, warm("train.py", "unrecorded", "none")), folder)
    return found


@pytest.mark.parametrize("obstacle", WARNINGS)
def test_training_is_bitwise_unaffected(runs, obstacle):
    assert runs[obstacle].status == 0, runs[obstacle].err
    assert runs[obstacle].out == runs["unrecorded"].out


@pytest.mark.parametrize("obstacle", WARNINGS)
def test_one_line_while_it_trains_and_one_at_the_end(runs, obstacle):
    warnings, closing = WARNINGS[obstacle]
    *said, last = runs[obstacle].said
    assert said == warnings
    assert last.startswith(closing)
    assert "Traceback" not in runs[obstacle].err


@pytest.mark.parametrize("obstacle", ["none", "file_size", "max_disk", "hook_once", "hook", "no_stderr", "writing"])
def test_what_was_written_can_be_read(runs, obstacle):
    run = runs[obstacle]
    assert verify(run.run).ok
    steps = run.steps()
    assert steps == list(range(len(steps)))
    assert steps
    precdoctor.diagnose(precdoctor.open_run(run.run))


def events(run: Finished, kind: str) -> list[dict]:
    found = precdoctor.open_run(run.run).events()
    return [json.loads(data) for data in found[found["event"] == kind]["data"]]


def test_a_full_disk_leaves_what_fitted(runs):
    run = runs["file_size"]
    assert 0 < len(run.steps()) < 40
    assert run.end()["reason"] == "disk"
    assert not list(run.ranks["rank-00000"].glob("*.tmp"))


def test_a_disk_budget_is_kept_and_says_what_it_cost(runs):
    run = runs["max_disk"]
    used = sum(file.stat().st_size for file in run.ranks["rank-00000"].iterdir())
    assert used < 2 * 100_000
    dropped = verify(run.run).ranks[0].dropped
    assert dropped.keys() == {"disk_budget"}
    tensors = precdoctor.open_run(run.run).tensors(columns=["step"])
    assert max(run.steps()) > tensors["step"].max()  # the small tables go on for a while


def test_one_internal_error_costs_one_row(runs):
    run = runs["hook_once"]
    assert run.steps() == list(range(40))
    (error,) = events(run, "error")
    assert error["message"] == "ZeroDivisionError: ours"
    assert error["where"].startswith("recording/observe/forward_hooks.py:")
    assert run.end()["errors"] == 1


@pytest.mark.parametrize("obstacle", ["hook", "no_stderr"])
def test_three_internal_errors_turn_recording_off(runs, obstacle):
    run = runs[obstacle]
    assert len(events(run, "error")) == 3
    assert events(run, "warning") == [
        {"message": "recording is off after 3 internal errors, the last one ZeroDivisionError: ours"}
    ]
    assert run.end()["reason"] == "disabled"
    assert run.steps() == list(range(11))


def test_a_failing_writer_states_what_was_lost(runs):
    run = runs["writing"]
    assert len(events(run, "error")) == 2  # the third ends the thread
    assert verify(run.run).ranks[0].dropped.keys() == {"error"}
    assert run.end()["reason"] == "error"


@pytest.mark.parametrize("obstacle", ["strict", "writing_strict"])
def test_strict_fails_the_run_on_the_first_internal_error(runs, obstacle):
    run = runs[obstacle]
    assert run.status == 1
    assert "ZeroDivisionError: ours" in run.err
    assert "Traceback" in run.err
    assert len(run.out.splitlines()) < 40


def test_an_exception_out_of_the_users_signal_handler_is_the_users(runs):
    """It happened to come while one of our hooks ran; swallowed, the script would have trained on."""
    run = runs["signal"]
    assert run.status == 0, run.err
    assert run.out.endswith(b"stopped by its own signal handler\n")
    assert events(run, "error") == []
    assert run.end()["errors"] == 0
