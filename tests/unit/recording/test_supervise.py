"""What stands beside the recorded command: it tells, asks for a halt, and never gets in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from precdoctor.recording.process import supervise
from precdoctor.recording.process.supervise import Online, Supervisor
from precdoctor.runlog.halting import halt_requested


def online(look, *, halts=False, command=None) -> Online:
    return Online(
        look=look,
        halts=lambda _finding: halts,
        title=lambda finding: f"PD201 {finding}",
        to_json=lambda finding, run: json.dumps({"finding": finding, "run": str(run)}) + "\n",
        command=command,
    )


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(supervise, "_SECONDS", 0.0)
    monkeypatch.setattr(supervise, "_PATIENCE", 0.0)


class Looks:
    """One finding at the second look; the run is over when that has been seen."""

    def __init__(self):
        self.seen: list[bool] = []
        self.supervisor: Supervisor | None = None

    def __call__(self, _run: Path, last: bool):
        self.seen.append(last)
        if len(self.seen) == 3:
            self.supervisor._over.set()
        return ["half of it is zero"] if len(self.seen) == 2 else []


@pytest.mark.parametrize("halts", [True, False])
def test_a_finding_is_handed_to_the_command_and_halts_the_run_if_it_should(quick, tmp_path, halts, capfd):
    looks = Looks()
    looks.supervisor = Supervisor(online(looks, halts=halts, command=f"cat >> {tmp_path}/found; echo told"), tmp_path)
    looks.supervisor.start()
    looks.supervisor._thread.join()
    assert looks.seen == [False, False, False, True], "and one last look when the run is over"
    assert json.loads((tmp_path / "found").read_text()) == {"finding": "half of it is zero", "run": str(tmp_path)}
    assert halt_requested(tmp_path) == ("--halt-on, PD201 half of it is zero" if halts else None)
    out, err = capfd.readouterr()
    assert out == "" and "told" in err, "stdout is the recorded command's"


def test_a_run_that_is_over_is_not_asked_to_stop(tmp_path, capsys):
    supervisor = Supervisor(online(lambda _run, last: ["x", "y"] if last else [], halts=True), tmp_path)
    supervisor._over.set()
    supervisor.start()
    supervisor.finish()
    assert halt_requested(tmp_path) is None
    assert capsys.readouterr().err.count("the command had ended before --halt-on could stop it: ") == 1


def test_a_look_that_fails_is_said_once_and_is_the_last(quick, tmp_path, capsys):
    looks = []

    def look(_run, last):
        looks.append(last)
        raise ZeroDivisionError("oops")

    supervisor = Supervisor(online(look), tmp_path)
    supervisor._over.set()
    supervisor.start()
    supervisor.finish()
    supervisor._look(last=True)
    assert looks == [True]
    assert capsys.readouterr().err.count("the online rules have stopped (ZeroDivisionError: oops)") == 1


@pytest.mark.parametrize(
    ("command", "says"), [("exit 7", "ended with status 7"), ("kill -TERM $$", "status -15"), ("true", "")]
)
def test_what_became_of_the_command(tmp_path, command, says, capsys):
    Supervisor(online(lambda *_: [], command=command), tmp_path)._run_command(command, "{}\n")
    err = capsys.readouterr().err
    assert says in err and bool(err) == bool(says)


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervise, "_COMMAND_SECONDS", 0.0)
    Supervisor(online(lambda *_: []), tmp_path)._run_command("exec sleep 1000", "{}\n")
    assert "was ended after" in capsys.readouterr().err
