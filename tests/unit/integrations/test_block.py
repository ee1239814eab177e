"""What the callbacks share: one recording at a time, closed whatever the trainer does. Nothing is recorded here: the
examples of docs/integrations.md do that, in a process of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from precdoctor.integrations import block as module
from precdoctor.integrations.block import RecordingCallback
from precdoctor.recording.session import Recording


@pytest.fixture
def told(monkeypatch):
    """What `precdoctor.record` was asked, and when its blocks ended."""
    said = []

    @contextlib.contextmanager
    def record(run, *, force, **options):
        said.append(("begin", run, force, options))
        yield Recording(Path(run or f"new-{len(said)}"))
        said.append(("end", run))

    monkeypatch.setattr(module, "record", record)
    monkeypatch.delenv("PRECDOCTOR_RUN", raising=False)
    return said


def test_options_go_to_record_and_a_resumed_training_counts_on(told):
    block = RecordingCallback("run", force=True, every=4)
    assert block.run is None
    block.begin_recording(first_step=100)
    assert told == [("begin", "run", True, {"first_step": 100, "every": 4})] and block.run == Path("run")
    block.end_recording()
    block.end_recording()
    assert told[1:] == [("end", "run")]


def test_the_user_may_number_the_steps(told):
    RecordingCallback("run", first_step=7).begin_recording(first_step=100)
    assert told[0][3] == {"first_step": 7}


def test_a_training_that_never_ended_is_closed_before_the_next(told):
    block = RecordingCallback()
    block.begin_recording(0)
    first = block.run
    block.begin_recording(0)
    assert [what for what, *_ in told] == ["begin", "end", "begin"] and block.run != first


def test_a_recording_that_cannot_begin_leaves_nothing_open(told, monkeypatch):
    @contextlib.contextmanager
    def refuse(*_arguments, **_options):
        raise ValueError("no")
        yield

    monkeypatch.setattr(module, "record", refuse)
    block = RecordingCallback("run")
    with pytest.raises(ValueError, match="no"):
        block.begin_recording(0)
    block.end_recording()


def test_under_the_command_it_leaves_the_recording_to_it(told, monkeypatch):
    monkeypatch.setenv("PRECDOCTOR_RUN", "/outer")
    block = RecordingCallback("run")
    block.begin_recording(0)
    block.end_recording()
    assert block.run == Path("/outer") and told == []
