"""A command that did not end well is said to have, at the top of whatever is told of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from precdoctor.cli import main
from precdoctor.diagnosis.ranking.ending import end_of_run, ending
from precdoctor.reporting.live.watcher import Phase, Watcher
from precdoctor.runlog import open_run
from precdoctor.runlog.lock import DirectoryLock
from tests.support.runs import write_run

STEPS = [{"step": n, "loss": 1.0, "sampled": True} for n in range(4)]
ROWS = [{"step": n, "kind": "output", "dtype": "float32", "numel": 4, "amax": 1.0} for n in range(4)]
STOP = {"reason": "stopped", "message": "non-finite loss at step 3"}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, None),
        ({"exit_status": 0}, None),
        ({"exit_status": None}, None),
        ({"exit_status": 1}, "The command ended with status 1"),
        ({"exit_status": 255}, "The command ended with status 255"),
        ({"exit_status": 137}, "The command ended with status 137 (SIGKILL, from outside or for want of memory)"),
        ({"exit_status": 130}, "The command ended with status 130 (SIGINT)"),
        (
            {"exit_status": 1, "exception": {"type": "MyError", "file": "t.py", "line": 3}},
            "The command ended with status 1, MyError at t.py:3",
        ),
        (
            {"exit_status": 1, "exception": {"type": "KeyError", "message": "'a'\nand more"}},
            "The command ended with status 1, KeyError: 'a'",
        ),
        ({"exit_status": 66, "stopped": "PD101"}, "The command was stopped by precdoctor: PD101"),
    ],
)
def test_an_ending_in_words(run, said):
    assert ending(run) == said


@pytest.mark.parametrize(
    ("command", "above"),
    [
        (["diagnose"], "No findings"),
        (["diagnose", "--output-format", "markdown"], "rules checked"),
        (["show"], "Timeline"),
    ],
)
@pytest.mark.parametrize("status", [0, 1])
def test_it_stands_at_the_top(command, above, status, tmp_path, capsys):
    run = write_run(tmp_path / "r", ROWS, STEPS, info={"exit_status": status})
    assert main([*command, str(run)]) == 0
    out = capsys.readouterr().out
    assert ("\nThe command ended with status 1.\n" in out.partition(above)[0]) == bool(status)
    assert above in out and out.count("ended with") == bool(status)


def test_programs_read_it_too(tmp_path, capsys):
    run = write_run(tmp_path / "r", ROWS, STEPS, info={"exit_status": 66}, end=STOP)
    assert main(["diagnose", "--output-format", "json", str(run)]) == 0
    facts = json.loads(capsys.readouterr().out)["run"]
    assert (facts["exit_status"], facts["stopped"]) == (66, STOP["message"])
    running = write_run(tmp_path / "running", ROWS, STEPS, end=False)
    assert main(["diagnose", "--output-format", "json", str(running)]) == 0
    facts = json.loads(capsys.readouterr().out)["run"]
    assert "exit_status" not in facts and "stopped" not in facts


def test_a_run_without_a_step_tells_it(tmp_path, capsys):
    run = write_run(tmp_path / "r", info={"exit_status": 1})
    assert main(["show", str(run)]) == 0
    assert "The command ended with status 1.\n" in capsys.readouterr().out
    assert main(["diagnose", str(run)]) == 3
    assert "(torch.func alone, and a step compiled as a whole, cannot be followed)" in capsys.readouterr().err


def test_a_run_without_a_process_tells_how_far_the_command_got(tmp_path, capsys):
    run = write_run(tmp_path / "r")
    shutil.rmtree(run / "rank-00000")
    (run / "attach.jsonl").write_text('{"event": "boot"}\n')
    assert main(["diagnose", str(run)]) == 3
    assert "holds nothing: the command never imported torch\n" in capsys.readouterr().err


def test_a_run_that_is_still_starting_is_not_called_empty(tmp_path, capsys):
    run = write_run(tmp_path / "r")
    shutil.rmtree(run / "rank-00000")
    (run / "attach.jsonl").write_text('{"event": "boot"}\n')
    lock = DirectoryLock(run)  # as the command holds it
    assert main(["diagnose", str(run)]) == 3
    assert "has no step yet, but its command is still running; try again" in capsys.readouterr().err
    assert main(["show", str(run)]) == 0
    assert "no process has recorded anything yet" in capsys.readouterr().out
    lock.release()


def test_a_log_that_was_not_closed_is_not_called_running_once_the_command_has_ended(tmp_path, capsys):
    for name, info in (("open", {}), ("ended", {"exit_status": 0})):
        main(["show", str(write_run(tmp_path / name, ROWS, STEPS, info=info, end=False))])
        assert ("or still running" in " ".join(capsys.readouterr().out.split())) == (name == "open")


def test_gate_and_compare_say_whose_command_it_was(tmp_path, capsys):
    good = write_run(tmp_path / "good", ROWS, STEPS, info={"exit_status": 0})
    bad = write_run(tmp_path / "bad", ROWS, STEPS, info={"exit_status": 139})
    main(["gate", str(bad), str(good)])
    out = capsys.readouterr().out
    assert f"{bad}: The command ended with status 139 (SIGSEGV)" in " ".join(out.split())
    assert str(good) not in out.partition("\n\n")[0]
    main(["compare", str(good), str(bad)])
    assert "The command of the second run ended with status 139 (SIGSEGV).\n" in capsys.readouterr().out


def test_the_html_report_says_it(tmp_path):
    from precdoctor.reporting.html.page import render

    bad = open_run(write_run(tmp_path / "bad", ROWS, STEPS, info={"exit_status": 1}))
    good = open_run(write_run(tmp_path / "good", ROWS, STEPS, info={"exit_status": 0}))
    assert render(bad).count("ended with status") == 1
    assert "Its command ended with status 1." in render(good, bad)
    assert "ended with status" not in render(good)


@pytest.mark.parametrize(("status", "words"), [(0, "closed its log"), (1, "The command ended with status 1")])
def test_the_live_view_says_it(status, words, tmp_path: Path):
    watcher = Watcher(write_run(tmp_path / "r", ROWS, STEPS, info={"exit_status": status}))
    watcher.poll()
    assert (watcher.phase, watcher.words) == (Phase.ENDED, words)


def test_the_live_view_of_a_run_that_recorded_nothing_comes_to_an_end(tmp_path: Path, capsys):
    run = write_run(tmp_path / "r", info={"exit_status": 0})
    shutil.rmtree(run / "rank-00000")
    (run / "attach.jsonl").write_text('{"event": "boot"}\n')
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out == "ended: nothing was recorded: the command never imported torch\n"


def test_a_rank_that_lost_its_peers_is_not_the_one_that_is_named(tmp_path: Path):
    ends = [{"reason": "exit", "exception": {"type": name}} for name in ("DistBackendError", "ValueError")]
    run = write_run(tmp_path / "r", ROWS, STEPS, info={"exit_status": 1}, end=ends[0])
    other = write_run(tmp_path / "other", ROWS, STEPS, end=ends[1])
    (other / "rank-00000").rename(run / "rank-00001")
    assert end_of_run(open_run(run))["exception"]["type"] == "ValueError"


def test_a_failed_command_fails_a_gate_with_findings_as_findings(tmp_path: Path, capsys):
    bad = [{**row, "kind": "weight", "name": "weight", "nan": 4, "amax": None} for row in ROWS]
    run = write_run(tmp_path / "r", bad, STEPS, info={"exit_status": 1})
    assert main(["gate", str(run)]) == 1
    assert "Note: The command of" in capsys.readouterr().out
