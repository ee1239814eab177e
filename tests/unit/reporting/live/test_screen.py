"""What the live view shows: every terminal size, hostile names, and what the run is at."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
from rich.cells import cell_len

from precdoctor.errors import CorruptRunError
from precdoctor.reporting.console import make_console
from precdoctor.reporting.live.check import PAUSE_SECONDS, PAUSE_TIMES, Check
from precdoctor.reporting.live.loop import print_lines, progress
from precdoctor.reporting.live.picture import Tensor
from precdoctor.reporting.live.screen import Size, label_of, screen
from precdoctor.reporting.live.watcher import Phase, Watcher
from precdoctor.runlog import RankWriter, create_rank_directory, create_run
from precdoctor.runlog.lock import DirectoryLock
from tests.support.hostile import NAMES
from tests.support.runs import columns_of, write_run

NOW = lambda: 0.0  # noqa: E731


def rows(names=("blocks.0.attn", "blocks.1.attn", "head")):
    return [
        {"step": s, "module": m, "kind": k, "dtype": "float16", "numel": 64, "amax": 60000.0 / (i + 1), "subnormal": i,
         "exp_lo": -20, "exp_hist": [1, 2, 3]}
        for s in range(4) for i, m in enumerate(names) for k in ("output", "grad_output")
    ]  # fmt: skip


def steps():
    return [
        {"step": s, "loss": 3.0 - s, "grad_norm": 1.0, "loss_scale": 2.0**16, "skipped": s == 1, "recorder_ns": 1,
         "step_ns": 100}
        for s in range(4)
    ]  # fmt: skip


def watched(path):
    watcher = Watcher(path, NOW)
    watcher.poll()
    watcher.poll()
    return watcher, Check(path, NOW)


def test_everything_there_is_at_80_by_24(tmp_path):
    watcher, check = watched(write_run(tmp_path / "mine", rows(), steps()))
    check.findings, check.step = [{"code": "PD601", "severity": "warning", "title": "blocks.0.attn is near the end"}], 3
    shown = screen(watcher, check, Size(80, 24)).plain
    parts = "mine|● ended|step 3|recorder 1 %|loss scale|2^16|1 skipped step|Least headroom|blocks.0.attn output|0.1"
    for part in f"{parts}|Most subnormal|WARNING PD601|as of step 3|q quits".split("|"):
        assert part in shown, part


def test_a_low_terminal_keeps_the_first_finding(tmp_path):
    watcher, check = watched(write_run(tmp_path / "run", rows(), steps()))
    check.findings = [{"code": "PD101", "severity": "error", "title": "t"}, {"code": "PD102", "severity": "error"}]
    shown = screen(watcher, check, Size(80, 9)).plain
    assert "Findings  2" in shown and "ERROR PD101" in shown and "loss" in shown


@pytest.mark.parametrize(
    ("kind", "name", "label"),
    [
        ("output", "", "a.b output"),
        ("input", "0", "a.b input 0"),
        ("grad_output", "", "a.b gradient"),
        ("weight", "bias", "a.b.bias"),
        ("weight_grad", "weight", "a.b.weight w. gradient"),
    ],
)
def test_tensors_are_called_as_people_call_them(kind, name, label):
    assert label_of(Tensor("Net#0", "a.b", kind, name, "float32")) == label


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("size", [(80, 24), (20, 5), (1, 1), (200, 60), (80, 8), (40, 12)])
def test_it_fits_every_terminal(tmp_path, size, ascii_only):
    watcher, check = watched(write_run(tmp_path / "run", rows(NAMES), steps()))
    check.findings = [{"code": "PD101", "severity": "error", "title": name} for name in NAMES]
    shown = screen(watcher, check, Size(*size, ascii_only=ascii_only)).plain
    lines = shown.split("\n")
    assert len(lines) <= size[1]
    assert all(cell_len(line) <= size[0] for line in lines)
    assert "\x1b" not in shown and "\r" not in shown


def test_ascii_terminals_get_ascii(tmp_path):
    watcher, check = watched(write_run(tmp_path / "run", rows(("m" * 90, "n")), steps()))
    assert screen(watcher, check, Size(80, 24, ascii_only=True)).plain.isascii()


def test_findings_are_never_pushed_out_by_tensors(tmp_path):
    watcher, check = watched(write_run(tmp_path / "run", rows([f"m{i}" for i in range(50)]), steps()))
    check.findings = [{"code": f"PD{i}", "severity": "error", "title": "t"} for i in range(101, 120)]
    shown = screen(watcher, check, Size(80, 24)).plain
    assert "PD101" in shown and "PD103" in shown and "q quits" in shown.split("\n")[-1]


# -- where the run stands --------------------------------------------------------------------------------------------


def test_a_run_without_a_process_is_starting(tmp_path):
    create_run(tmp_path / "run", {"command": ["/usr/bin/python", "train.py"]})
    watcher, check = watched(tmp_path / "run")
    assert watcher.phase is Phase.STARTING and "none has called a model yet" in watcher.words
    shown = screen(watcher, check, Size(80, 24)).plain
    assert "python train.py" in shown and "● starting" in shown and "not judged yet" in shown


def test_a_living_writer_is_running_and_a_dead_one_is_told(tmp_path):
    path = tmp_path / "run"
    create_run(path, {"host": {"name": platform.node()}})
    writer = RankWriter(create_rank_directory(path, 0))
    watcher, _ = watched(path)
    assert watcher.phase is Phase.STARTING
    writer.append("steps", columns_of("steps", [{"step": 0, "loss": 1.0}]), 1)
    watcher.poll()
    assert watcher.phase is Phase.RUNNING and watcher.words == ""
    writer.abandon()  # as a SIGKILL would: the lock is free, the stream is open, there is no end.json
    watcher.poll()
    assert watcher.phase is Phase.RUNNING  # one look proves nothing: a new process locks after it made its directory
    watcher.poll()
    assert watcher.phase is Phase.DIED and "ended without closing the log" in watcher.words
    assert progress(watcher).startswith("died: step 0, loss 1")


def test_a_launcher_that_is_killed_before_anything_is_recorded_is_told(tmp_path):
    path, ended = tmp_path / "run", subprocess.Popen(["true"])
    ended.wait()
    create_run(path, {"host": {"name": platform.node()}, "pid": ended.pid})
    lock = DirectoryLock(path)
    watcher, _ = watched(path)
    watcher.poll()
    assert watcher.phase is Phase.STARTING
    lock.release()
    watcher.poll()
    assert watcher.phase is Phase.STARTING  # one look proves nothing: it may have ended since run.json was read
    (path / "attach.jsonl").write_text(json.dumps({"pid": os.getpid(), "event": "torch"}) + "\n")
    watcher.poll()
    assert watcher.phase is Phase.STARTING  # its child lives, and may yet record
    assert watcher.words == "`precdoctor record` was killed; 1 process so far, none has called a model yet"
    (path / "attach.jsonl").write_text(json.dumps({"pid": ended.pid, "event": "torch"}) + "\n")
    watcher.poll()
    assert watcher.phase is Phase.DIED
    assert progress(watcher) == "died: `precdoctor record` was killed before anything was recorded"


def test_one_dead_rank_of_two_is_named(tmp_path):
    path = tmp_path / "run"
    create_run(path, {"host": {"name": platform.node()}})
    writers = [RankWriter(create_rank_directory(path, rank)) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.append("steps", columns_of("steps", [{"step": 0}], rank), 1)
    writers[1].abandon()
    watcher, _ = watched(path)
    assert watcher.phase is Phase.RUNNING and watcher.words.startswith("rank 1 ended without")
    writers[0].abandon()


def test_on_another_machine_silence_is_all_there_is_to_tell(tmp_path):
    path = write_run(tmp_path / "run", steps=steps(), info={"host": {"name": "elsewhere"}}, end=False)
    now = [0.0]
    watcher = Watcher(path, lambda: now[0])
    watcher.poll()
    assert watcher.phase is Phase.RUNNING
    now[0] = 300.0
    watcher.poll()
    assert watcher.phase is Phase.SILENT and "no new row for 300 s" in watcher.words


def test_a_run_directory_that_vanishes_is_gone(tmp_path):
    import shutil

    path = write_run(tmp_path / "run", steps=steps())
    watcher, _ = watched(path)
    shutil.rmtree(path)
    watcher.poll()
    assert watcher.phase is Phase.GONE and watcher.picture.last_step == 3


def test_damage_is_told_and_what_was_read_stays(tmp_path):
    path = write_run(tmp_path / "run", steps=steps())
    watcher, check = watched(path)
    (path / "rank-00000" / "parts.jsonl").write_text("{}\n")
    watcher.poll()
    assert watcher.problem and "is damaged" in watcher.problem
    assert "is damaged" in screen(watcher, check, Size(120, 24)).plain and "step 3" in progress(watcher)


@pytest.mark.parametrize("name", ["rank.json", "end.json", "parts.jsonl"])
def test_what_a_process_states_of_itself_ends_the_watch_when_it_is_damaged(tmp_path, name):
    path = write_run(tmp_path / "run", steps=steps())
    (path / "rank-00000" / name).write_text("[]\n")
    with pytest.raises(CorruptRunError, match=f"{name} is damaged") as caught:
        print_lines(Watcher(path, NOW), Check(path, NOW), make_console(sys.stdout), 0.0)
    assert str(caught.value).count("log verify") == 1


def test_of_several_ranks_one_whose_facts_are_damaged_is_told(tmp_path):
    path = write_run(tmp_path / "run", rows(), steps(), ranks=2)
    (path / "rank-00001" / "rank.json").write_text("[]\n")
    watcher, _ = watched(path)
    assert watcher.phase is Phase.ENDED and "rank-00001/rank.json is damaged" in watcher.problem


def test_damaged_rows_do_not_keep_the_watch_from_ending(tmp_path):
    path = write_run(tmp_path / "run", rows(), steps())
    (part,) = path.glob("rank-00000/steps-*.parquet")
    part.write_bytes(part.read_bytes()[:-9])
    watcher, _ = watched(path)
    assert watcher.phase is Phase.ENDED and "checksum" in watcher.problem


def test_what_goes_away_between_two_looks_is_told(tmp_path, monkeypatch):
    from precdoctor.reporting.live import watcher as module

    watcher, _ = watched(write_run(tmp_path / "run", steps=steps(), end=False))

    def gone(_directory):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(module, "is_locked", gone)
    watcher.poll()
    assert "No such file or directory" in watcher.problem and watcher.picture.last_step == 3


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"type": "cpu", "name": "x86_64"}, "1 rank, cpu"),
        ({"type": "cuda", "name": "NVIDIA H100"}, "1 rank, NVIDIA H100"),
        ({"type": "mps"}, "1 rank, mps"),
    ],
)
def test_the_device_is_named(tmp_path, device, words):
    watcher, check = watched(write_run(tmp_path / "run", steps=steps(), facts={"device": device}))
    assert words in screen(watcher, check, Size(100, 24)).plain


# -- diagnoses now and then ------------------------------------------------------------------------------------------


def test_diagnoses_keep_their_distance(tmp_path, monkeypatch):
    now = [0.0]
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)  # where no module is taken from
    path = write_run(tmp_path / "run", steps=[{"step": 0, "loss": float("nan"), "non_finite": 1}])
    check = Check(path, lambda: now[0])
    assert check.due(1, last=False)
    check.begin(1)
    assert check.busy and not check.due(2, last=True)
    check._process.wait()
    now[0] = 4.0  # what it took
    assert check.poll() and not check.busy
    assert not (tmp_path / "executed").exists()
    assert {f["code"] for f in check.findings} == {"PD103"} and check.step == 0 and check.problem is None
    pause = max(PAUSE_SECONDS, 4.0 * PAUSE_TIMES)
    now[0] = 4.0 + pause - 0.5
    assert not check.due(2, last=False) and check.due(2, last=True) and not check.due(1, last=True)
    now[0] += 1.0
    assert check.due(2, last=False)


def test_a_diagnosis_that_fails_says_why(tmp_path):
    path = write_run(tmp_path / "run")  # no step
    check = Check(path, NOW)
    check.begin(1)
    check._process.wait()
    assert check.poll() and "holds no training step" in check.problem and check.findings is None


def test_a_diagnosis_under_way_can_be_ended(tmp_path):
    check = Check(write_run(tmp_path / "run"), NOW)
    check.begin(1)
    process = check._process
    check.stop()
    assert process.returncode is not None and not check.busy
    check.stop()
