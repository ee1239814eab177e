"""The drain thread against a writer that is slow, full, broken or in the middle of something."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
import time

import pytest
import torch

import precdoctor
from precdoctor.recording import kernels
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output import drain as module
from precdoctor.recording.output.drain import Drain
from precdoctor.recording.slots.slot_table import Site, SlotTable
from precdoctor.recording.slots.step_batch import EventBatch, OpBatch, StepBatch, StepFacts
from precdoctor.runlog.layout import create_run
from precdoctor.runlog.writer import RankWriter

CPU = torch.device("cpu")
PLACE = Place("Net#0", "", "Net")


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


@pytest.fixture
def run(tmp_path):
    create_run(tmp_path / "run", {"command": []})
    return tmp_path / "run"


@pytest.fixture
def slow(monkeypatch):
    """A writer that takes no step until it is let go; counts what it was given."""

    class SlowWriter(RankWriter):
        go = threading.Event()
        reached = threading.Event()

        def append(self, *args):
            self.reached.set()
            assert self.go.wait(60)
            super().append(*args)

    monkeypatch.setattr(module, "RankWriter", SlowWriter)
    yield SlowWriter
    SlowWriter.go.set()


class Steps:
    """Finished steps of two tensors each."""

    def __init__(self):
        self._slots = SlotTable()

    def __call__(self, number: int) -> StepBatch:
        for name in ("a", "b"):
            entry = self._slots.entry(Site(PLACE, "output", name, 0, "train", "float32"), CPU)
            kernels.stat(torch.full((3,), 1.5), entry.slot)
            entry.shape = (3,)
        snapshots = {CPU: kernels.bank(CPU).snapshot(len(self._slots))}
        return StepBatch(StepFacts(number, complete=True, sampled=True), self._slots.take(), snapshots)


def tables(run):
    opened = precdoctor.open_run(run)
    return opened.tensors(), opened.steps(), opened.events()


def drops(events) -> dict[str, int]:
    counted: dict[str, int] = {}
    for data in events[events["event"] == "drop"]["data"]:
        content = json.loads(data)
        counted[content["reason"]] = counted.get(content["reason"], 0) + content["rows"]
    return counted


def test_a_slow_writer_costs_tensor_rows_and_never_the_training_side(run, slow, capsys, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ROWS", 2 * module._MAX_STEPS)
    steps, total = Steps(), 40
    drain = Drain(run, 0, RecordOptions())
    drain.put(steps(0))
    assert slow.reached.wait(60)  # the thread is stuck with step 0 from here on
    for number in range(1, total):
        drain.put(steps(number))  # all of these return, although nothing is written
        drain.put(EventBatch([{"event": "warning", "data": {"n": number}}]))
    waiting = [item for item in drain._queue if isinstance(item, StepBatch) and item.entries]
    assert len(waiting) == module._MAX_STEPS
    slow.go.set()
    drain.close({"reason": "exit"})
    tensors, rows, events = tables(run)
    assert sorted(rows["step"]) == list(range(total))  # every steps row is kept
    assert (events["event"] == "warning").sum() == total - 1  # ... and every event
    kept = set(tensors["step"])
    assert kept == {0, *range(total - module._MAX_STEPS, total)}  # the oldest ones are let go
    assert drops(events) == {"queue_full": 2 * (total - len(kept))}
    # which steps lost something is known, for gates over an interval
    assert set(events[events["event"] == "drop"]["step"]) == set(range(total)) - kept
    assert capsys.readouterr().err == ""


def test_what_comes_with_the_end_while_facts_are_written_is_not_left_behind(run, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    class SlowFacts(RankWriter):
        def write_facts(self, facts):
            begun.set()
            assert go.wait(60)
            super().write_facts(facts)

    monkeypatch.setattr(module, "RankWriter", SlowFacts)
    steps, drain = Steps(), Drain(run, 0, RecordOptions())
    drain.write_facts({"world_size": 1})
    assert begun.wait(60)
    drain.put(steps(0))
    drain.put(steps(1))
    drain.close({"reason": "exit"}, wait=False)
    go.set()
    drain.close({})
    tensors, rows, _ = tables(run)
    assert (len(tensors), list(rows["step"])) == (4, [0, 1])


def test_the_thread_leaves_captures_before_it_asks_a_device_for_anything(run, monkeypatch):
    """A query on any other thread makes the capture of a CUDA graph fail."""
    order = []
    monkeypatch.setattr(kernels, "stay_out_of_captures", lambda: order.append("stays out"))
    drain = Drain(run, 0, RecordOptions())
    drain.write_facts({"optimizers": [{"name": "SGD#0", "steps_before": lambda: order.append("asks") or 7.0}]})
    drain.close({"reason": "exit"})
    assert order[:2] == ["stays out", "asks"]
    assert json.loads((drain.directory / "rank.json").read_text())["optimizers"][0]["steps_before"] == 7


def test_without_a_thread_all_is_written_as_it_is_closed(run):
    """An interpreter that ends starts no thread any more."""
    steps, before = Steps(), threading.active_count()
    drain = Drain(run, 0, RecordOptions(), threaded=False)
    drain.put(EventBatch([{"event": "warning"}]))
    drain.put(steps(0))
    assert threading.active_count() == before
    drain.close({"reason": "exit"})
    drain.close({"reason": "exit"})
    tensors, rows, events = tables(run)
    assert (len(tensors), list(rows["step"]), len(events)) == (2, [0], 1)


def test_steps_of_a_small_model_may_wait_in_greater_number(run, slow):
    steps = Steps()
    drain = Drain(run, 0, RecordOptions())
    for number in range(5 * module._MAX_STEPS):
        drain.put(steps(number))
    slow.go.set()
    drain.close({"reason": "exit"})
    tensors, _, events = tables(run)
    assert len(tensors) == 2 * 5 * module._MAX_STEPS
    assert drops(events) == {}


def test_memory_in_flight_is_that_of_the_rows_in_use_and_never_more_than_the_limit(run, slow):
    """A few rows are copied; a block that most rows of are used goes along whole, and counts whole."""
    few, many = SlotTable(), SlotTable()
    drain = Drain(run, 0, RecordOptions())

    def step(slots, tensors):
        for name in range(tensors):
            entry = slots.entry(Site(PLACE, "output", str(name), 0, "train", "float32"), CPU)
            kernels.stat(torch.full((3,), 1.5), entry.slot)
        return StepBatch(StepFacts(0, sampled=True), slots.take(), {CPU: kernels.bank(CPU).snapshot(len(slots))})

    sizes = [step(few, 3), step(many, 100), step(many, 130)]
    assert [batch.snapshots[CPU].rows for batch in sizes] == [3, 128, 128 + 2]
    drain.put(EventBatch([{"event": "warning"}]))
    assert slow.reached.wait(60)
    for _ in range(200):
        drain.put(step(many, 100))
    waiting = [item for item in drain._queue if isinstance(item, StepBatch) and item.entries]
    assert 8 <= len(waiting) <= module._MAX_ROWS / 128
    assert drain.behind
    slow.go.set()
    drain.close({"reason": "exit"})


def test_what_waits_is_bounded_however_long_the_file_system_hangs(run, slow, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ITEMS", 50)
    drain = Drain(run, 0, RecordOptions())
    drain.put(EventBatch([{"event": "warning"}]))
    assert slow.reached.wait(60)
    for number in range(200):
        drain.put(StepBatch(StepFacts(number), [], {}))
    assert len(drain._queue) == 50
    slow.go.set()
    drain.close({"reason": "exit"})
    _, rows, events = tables(run)
    assert sorted(rows["step"]) == list(range(150, 200))
    assert drops(events) == {"queue_full": 150}


def test_queued_steps_hold_no_tensor_of_the_training(run, slow):
    drain = Drain(run, 0, RecordOptions())
    steps = Steps()
    drain.put(steps(0))
    assert slow.reached.wait(60)
    batch = steps(1)
    held = [o for o in gc.get_referents(batch, *batch.entries, batch.facts) if isinstance(o, torch.Tensor)]
    drain.put(batch)
    slow.go.set()
    drain.close({})
    assert held == []


def test_a_full_disk_budget_keeps_the_small_tables(run, capsys):
    steps, total = Steps(), 400
    options = RecordOptions(max_disk=150_000)
    drain = Drain(run, 0, options)
    for number in range(total):
        drain.put(steps(number))
        while drain._queue:  # one at a time: this is about the disk
            time.sleep(0.001)
        if not drain.takes_tensors:
            break
    assert number < total - 1
    last = number + 1
    drain.put(StepBatch(StepFacts(last, complete=True), [], {}))
    drain.close({"reason": "exit"})
    tensors, rows, events = tables(run)
    assert max(rows["step"]) == last > max(tensors["step"])
    assert drops(events).keys() == {"disk_budget"}
    assert capsys.readouterr().err == (
        "precdoctor: the log has reached --max-disk (150000 bytes); tensors are no longer recorded, training goes on\n"
    )


def test_one_internal_error_loses_one_step(run, monkeypatch, capsys):
    original = module.step_row

    def step_row(batch, *args):
        if batch.facts.step == 1:
            raise ZeroDivisionError("ours")
        return original(batch, *args)

    monkeypatch.setattr(module, "step_row", step_row)
    steps = Steps()
    drain = Drain(run, 0, RecordOptions())
    for number in range(3):
        drain.put(steps(number))
    drain.close({"reason": "exit"})
    tensors, rows, events = tables(run)
    assert sorted(rows["step"]) == [0, 2]
    assert set(tensors["step"]) == {0, 2}
    error = events[events["event"] == "error"].iloc[0]
    assert error["step"] == 1
    assert "ZeroDivisionError: ours" in error["data"]
    assert drops(events) == {"error": 3}
    assert capsys.readouterr().err.count("\n") == 1


def test_three_internal_errors_end_the_recording_and_say_so_once(run, monkeypatch, capsys):
    monkeypatch.setattr(module, "step_row", lambda *a: 1 / 0)
    steps = Steps()
    drain = Drain(run, 0, RecordOptions())
    for number in range(5):
        drain.put(steps(number))
    drain.close({"reason": "exit"})
    assert drain.failed
    assert isinstance(drain.defect, ZeroDivisionError)
    end = precdoctor.open_run(run).ranks[0].end
    assert end["reason"] == "error"
    assert "ZeroDivisionError" in end["message"]
    assert capsys.readouterr().err.count("\n") == 1
    drain.put(steps(9))
    assert not drain._queue  # nothing piles up behind a thread that is gone


def test_a_vanished_directory_ends_the_recording_and_says_so_once(run, capsys):
    drain = Drain(run, 0, RecordOptions())
    run.rename(run.with_name("gone"))
    drain.write_facts({})
    drain.close({"reason": "exit"})
    assert drain.failed
    said = capsys.readouterr().err
    assert said == (
        "precdoctor: the log cannot be written (No such file or directory); recording has stopped, training goes on\n"
    )


def test_a_full_disk_ends_the_recording_without_an_end_marker(run, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps = Steps()
    drain = Drain(run, 0, RecordOptions())
    drain.put(steps(0))
    while not any(file.stat().st_size for file in drain.directory.glob("steps*")):
        time.sleep(0.001)
    monkeypatch.setattr("os.pwrite", full)
    monkeypatch.setattr("os.fsync", full)
    drain.put(steps(1))
    drain.put(steps(2))
    drain.close({"reason": "exit"})
    monkeypatch.undo()
    assert precdoctor.open_run(run).ranks[0].end is None
    assert list(tables(run)[1]["step"]) == [0]  # what was there before can be read
    said = capsys.readouterr().err
    assert said == (
        "precdoctor: the log cannot be written (No space left on device); recording has stopped, training goes on\n"
    )


def test_a_fork_waits_for_the_thread_to_put_down_its_work(run, slow):
    drain = Drain(run, 0, RecordOptions())
    assert drain.pause()  # idle
    drain.resume()
    drain.put(EventBatch([{"event": "warning"}]))
    assert slow.reached.wait(60)
    drain._fork_patience = 0.01
    assert not drain.pause()  # it is writing: the fork goes ahead without it in the end
    assert drain._fork_patience == 0.0  # ... and the next one at once
    slow.go.set()
    drain.close({})
    assert drain.pause()


def test_numbers_of_a_finished_step_come_through(run):
    steps = Steps()
    drain = Drain(run, 3, RecordOptions())
    drain.put(steps(7))
    drain.write_facts({"roots": []})
    drain.close({"reason": "exit", "steps": 8})
    tensors, rows, _ = tables(run)
    assert list(tensors["name"]) == ["a", "b"]
    assert set(tensors["rank"]) == set(rows["rank"]) == {3}
    assert list(tensors["amax"]) == [1.5, 1.5]
    assert precdoctor.open_run(run).ranks[0].end == {"reason": "exit", "steps": 8, "dropped": {}}


# --- lists of ops -----------------------------------------------------------------------------------------------------


def op_batch(step: int, rows: int = 3) -> OpBatch:
    place = {"op": "aten.mul.Tensor", "phase": "forward", "root": "", "module": "", "side": "out", "dtype": "float32"}
    columns = {name: [value] * rows for name, value in place.items()}
    return OpBatch(step, {**columns, "index": list(range(rows)), "position": [0] * rows, "numel": [1] * rows}, rows)


def test_a_list_of_ops_reaches_the_log(run):
    drain = Drain(run, 0, RecordOptions())
    drain.put(op_batch(4))
    drain.close({"reason": "exit"})
    ops = precdoctor.open_run(run).ops()
    assert ops["step"].tolist() == [4, 4, 4] and ops["index"].tolist() == [0, 1, 2]


def test_lists_that_the_disk_cannot_follow_are_counted(run, slow):
    drain = Drain(run, 0, RecordOptions())
    drain.put(EventBatch([{"event": "warning"}]))
    assert slow.reached.wait(60)
    for step in range(8):
        drain.put(op_batch(step))
    slow.go.set()
    drain.close({"reason": "exit"})
    opened = precdoctor.open_run(run)
    assert sorted(set(opened.ops()["step"])) == [0, 1, 2, 3]
    [drop] = opened.events(filters=[("event", "==", "drop")])["data"]
    assert json.loads(drop) == {"reason": "queue_full", "rows": 12}


def test_a_list_above_the_budget_is_left_out_and_counted(run, capfd):
    drain = Drain(run, 0, RecordOptions(max_disk=200_000))
    for step in range(40):
        drain.put(op_batch(step, 2000))
        while not drain.idle:
            time.sleep(0.001)
    drain.close({"reason": "exit"})
    opened = precdoctor.open_run(run)
    drops = [json.loads(d) for d in opened.events(filters=[("event", "==", "drop")])["data"]]
    assert drops and {(d["reason"], d["rows"]) for d in drops} == {("disk_budget", 2000)}
    assert len(opened.ops()) + 2000 * len(drops) == 80_000
    assert "ops are no longer listed" in capfd.readouterr().err
