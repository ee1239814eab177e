"""Logs that state a great deal of work: counted in listings and opened files, and refused above stated caps."""

import io
import os
import time

import pytest

from precdoctor.cli import main
from precdoctor.cli.common import Progress
from precdoctor.diagnosis.engine import diagnose, view_of
from precdoctor.diagnosis.survey import view as view_module
from precdoctor.diagnosis.survey.view import Process
from precdoctor.errors import RunTooLargeError
from precdoctor.runlog import caps, layout, open_run, parts, reader, verify
from tests.support.runs import write_run

TENSORS = [{"step": s, "module": m, "kind": k, "numel": 4} for s in (0, 1) for m in "ab" for k in ("output", "weight")]
STEPS = [{"step": s, "loss": 1.0} for s in (0, 1)]


def age(run):
    """Make the directories older than the coarsest clock of a file system."""
    for directory in (run, *run.iterdir()):
        os.utime(directory, ns=(0, time.time_ns() - 10**11))
    return run


@pytest.fixture
def many_ranks(tmp_path):
    return age(write_run(tmp_path / "run", TENSORS, STEPS, ranks=12))


@pytest.fixture
def many_attempts(tmp_path):
    """One rank that was started ten times; hostile, because all of it is one rank."""
    run = write_run(tmp_path / "run", TENSORS, STEPS)
    for attempt in range(1, 10):
        directory = run / f"rank-00000.{attempt}"
        directory.mkdir()
        for file in (run / "rank-00000").iterdir():
            os.link(file, directory / file.name)
    return age(run)


@pytest.mark.parametrize("command", [["diagnose"], ["report", "-o", os.devnull, "--force"], ["show"]])
def test_each_directory_is_listed_twice_however_many_rules_ask(many_ranks, monkeypatch, command):
    listed, scandir = [], os.scandir

    def counted(path):
        listed.append(str(path))
        return scandir(path)

    monkeypatch.setattr(layout.os, "scandir", counted)
    main([*command[:1], str(many_ranks), *command[1:]])
    mine = [path for path in listed if path.startswith(str(many_ranks))]
    assert len(mine) <= 1 + 2 * 12, "once for streams, once for sealed parts"


def test_the_parts_of_other_processes_are_left_alone(many_attempts, monkeypatch):
    view = view_of(open_run(many_attempts))
    opened, read = [], parts.read_regular
    monkeypatch.setattr(parts, "read_regular", lambda path, limit: opened.append(path.parent.name) or read(path, limit))
    for attempt in range(10):
        rows = view.rows(Process(0, attempt), 1)
        assert {(r.attempt, r.step) for r in rows} == {(attempt, 1)} and len(rows) == 4
    assert sorted(opened) == sorted(f"rank-00000{f'.{n}' if n else ''}" for n in range(10))


def test_rows_of_a_step_are_read_once_for_all_rules(many_ranks, monkeypatch):
    opened, read = [], parts.read_regular
    monkeypatch.setattr(parts, "read_regular", lambda path, limit: opened.append(path) or read(path, limit))
    view = view_of(open_run(many_ranks))
    for _ in range(3):
        for rank in range(12):
            assert len(view.rows(Process(rank, 0), 1)) == 4
    assert len(opened) == len(set(opened)) == 2 * 12, "steps and tensors of each"


CAPS = [
    (reader, "MAX_DIRECTORIES", 11, "12 rank directories"),
    (reader, "MAX_PARTS", 23, "24 parts"),
    (reader, "MAX_ROWS", {"tensors": 95, "steps": 99, "events": 99}, "96 rows of tensors"),
    (reader, "MAX_ROWS", {"tensors": 99, "steps": 23, "events": 99}, "24 rows of steps"),
]


@pytest.mark.parametrize(("module", "name", "limit", "said"), CAPS)
def test_above_a_cap_a_log_is_refused_before_a_part_is_opened(
    many_ranks, monkeypatch, capsys, module, name, limit, said
):
    monkeypatch.delenv(caps.ANY_SIZE, raising=False)
    monkeypatch.setattr(module, name, limit)
    opened, read = [], parts.read_regular
    monkeypatch.setattr(parts, "read_regular", lambda path, most: opened.append(path) or read(path, most))
    assert main(["diagnose", str(many_ranks)]) == 3
    error = capsys.readouterr().err
    assert said in error and "--any-size" in error and error.count("\n") == 1
    assert not opened
    monkeypatch.setenv(caps.ANY_SIZE, "")  # taken back after the test
    assert main(["--any-size", "diagnose", str(many_ranks)]) == 0
    assert opened


def test_a_step_with_more_tensors_than_any_model_has(many_ranks, monkeypatch):
    monkeypatch.setattr(view_module, "MAX_STEP_ROWS", 3)
    view = view_of(open_run(many_ranks))
    with pytest.raises(RunTooLargeError, match="4 or more tensors of step 1"):
        view.rows(Process(0, 0), 1)


def test_verify_holds_the_cap_on_directories(many_ranks, monkeypatch, capsys):
    monkeypatch.delenv(caps.ANY_SIZE, raising=False)
    monkeypatch.setattr(verify, "MAX_DIRECTORIES", 11)
    assert main(["log", "verify", str(many_ranks)]) == 3
    assert "--any-size" in capsys.readouterr().err


def test_a_run_says_how_far_it_is(many_ranks):
    run = open_run(many_ranks)
    seen = []
    run.progress = lambda *told: seen.append(told)
    diagnose(run)
    assert ("reading directories", 12, 12) in seen
    of = next(of for what, _, of in seen if what == "rules")
    assert [done for what, done, _ in seen if what == "rules"] == list(range(1, of + 1))


def test_progress_is_one_line_that_goes_away():
    now = [0.0]
    screen = io.StringIO()
    progress = Progress(screen, clock=lambda: now[0])
    progress("rules", 1, 9)
    assert screen.getvalue() == "", "quick commands say nothing"
    now[0] = 1.5
    progress("rules", 2, 9)
    progress("rules", 3, 9)
    assert screen.getvalue().endswith("rules 2 of 9") and "\n" not in screen.getvalue()
    progress("rules", 9, 9)
    assert screen.getvalue().endswith("\r\x1b[2K")
