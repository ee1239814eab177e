"""The directory of a process: when it is made, and what becomes of a process that cannot have one."""

from __future__ import annotations

import json

import pytest

import precdoctor
from precdoctor.recording import kernels
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder import rank_claim as module
from precdoctor.runlog.files import ATTACH_FILE
from precdoctor.runlog.layout import create_run, rank_directories


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)
    create_run(tmp_path / "run", {"command": []})
    recorder = Recorder(tmp_path / "run", RecordOptions())
    assert recorder.arm()
    yield recorder
    recorder.close()


def notes(recorder):
    return [json.loads(line)["event"] for line in (recorder.run / ATTACH_FILE).read_text().splitlines()]


def test_an_armed_process_has_no_directory_until_it_trains(recorder):
    assert not rank_directories(recorder.run)
    recorder.close()
    assert not rank_directories(recorder.run)
    assert notes(recorder) == ["model"]


def test_events_wait_for_the_directory(recorder):
    recorder.event("warning", data={"message": "early"})
    recorder.end_step()
    recorder.event("warning", data={"message": "late"})
    recorder.close()
    events = precdoctor.open_run(recorder.run).events()
    assert [json.loads(data)["message"] for data in events["data"]] == ["early", "late"]
    assert notes(recorder) == ["model", "armed"]


def test_what_waits_is_bounded(recorder, monkeypatch):
    monkeypatch.setattr(module, "_MAX_WAITING", 3)
    for _ in range(10):
        recorder.event("warning", data={})
    recorder.end_step()
    recorder.close()
    assert len(precdoctor.open_run(recorder.run).events()) == 3


def test_an_incident_makes_a_rank(recorder):
    recorder.event("incident", data={})
    assert rank_directories(recorder.run)


def test_a_rank_has_the_number_that_the_process_has_by_then(recorder, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    recorder.end_step()
    assert [rank.path.name for rank in rank_directories(recorder.run)] == ["rank-00003"]


def test_a_process_that_cannot_have_a_directory_trains_unrecorded(recorder, monkeypatch, capsys):
    recorder.run.joinpath(ATTACH_FILE).unlink()
    recorder.run.joinpath("run.json").unlink()
    recorder.run.rmdir()
    assert recorder.claim.make() is False
    assert (recorder.state, recorder.live) == ("off", False)
    assert "the run directory cannot be written" in capsys.readouterr().err
    recorder.end_step()  # whatever still runs of the step in progress


def test_calls_without_gradients_are_measured_until_patience_ends(recorder):
    for _ in range(module.MAX_CALLS_BEFORE):
        recorder.claim.forward_begins(gradients=False)
        assert recorder.live
    recorder.claim.forward_begins(gradients=False)
    assert not recorder.live and not recorder.claim.may_train
    recorder.claim.forward_begins(gradients=True)
    assert recorder.live
    recorder.claim.forward_begins(gradients=False)
    recorder.claim.backward_begins()
    assert recorder.live and recorder.claim.may_train
