"""A signal handler of the user's that raises in the middle of our code: between any two lines, wherever that is."""

from __future__ import annotations

import ast
import linecache
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import precdoctor
from precdoctor.recording import kernels
from precdoctor.recording.kernels import Bank
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output import process_facts
from precdoctor.recording.output.drain import Drain
from precdoctor.recording.process.deferral import HeldSignals
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.slots.step_batch import EventBatch
from precdoctor.runlog.layout import create_run

RECORDING = Path(precdoctor.__file__).parent / "recording"
#: These run where no handler of the user's does: in the parent of the run, on the drain thread, before the script.
ELSEWHERE = {"launch.py", "supervise.py", "drain.py", "sitecustomize.py", "native.py", "options.py"}
#: What torch raises for its own reasons, and a handler for any.
WIDE = {"Exception", "RuntimeError", "BaseException"}


class Timeout(RuntimeError):
    """As torch's own errors are, so that no ``except RuntimeError`` is to take it for one of them."""


def raise_timeout(number, frame):
    raise Timeout


@pytest.fixture
def handler():
    previous = signal.signal(signal.SIGUSR1, raise_timeout)
    yield lambda *_: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)


def interrupted(call, code) -> int:
    """Makes ``call`` again and again, raising at every line of ``code`` in turn; how many lines there were.

    Not at ``with``: the interpreter runs no handler between taking a lock made in C and the first line under it, nor
    between the last line and giving it back.
    """
    for wanted in range(100):
        if not interrupted_once(call, code, wanted):
            return wanted
    raise AssertionError("it never came through")


def interrupted_once(call, code, wanted) -> bool:
    """Whether ``code`` came as far as its line ``wanted``, counted as they run, and was interrupted there."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code is not code:
            return trace if event == "call" else None
        if event == "line" and not linecache.getline(code.co_filename, frame.f_lineno).strip().startswith("with "):
            seen += 1
            if seen == wanted + 1:
                raise Timeout
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Timeout:
        return True
    finally:
        sys.settrace(before)
    return False


def test_switches_that_cannot_be_read_are_told_from_an_interruption(handler):
    with pytest.raises(Timeout):
        process_facts._read(handler)


def test_a_bank_never_points_to_memory_it_has_given_away():
    bank = Bank(torch.device("cpu"))
    slots = 200

    def step():
        for slot in (0, slots):
            ints, floats = bank.row(slot)
            assert bank.addresses(slot) == (ints.data_ptr(), floats.data_ptr())
        bank.snapshot(slots + 1).release()

    assert interrupted(step, Bank.snapshot.__code__) > 5
    step()
    fresh = Bank(torch.device("cpu"))
    bank = fresh
    assert interrupted(step, Bank.row.__code__) > 2
    step()


def test_the_queue_outlives_an_interruption_anywhere_in_it(tmp_path):
    create_run(tmp_path / "run", {"command": []})
    drain = Drain(tmp_path / "run", 0, RecordOptions())
    puts = iter(range(1000))
    row = {"event": "warning", "step": 0, "micro_step": 0, "time_ns": 0, "data": {}}
    lines = interrupted(lambda: drain.put(EventBatch([{**row, "step": next(puts)}])), Drain.put.__code__)
    drain.close({"reason": "exit", "steps": 0, "errors": 0})
    assert not drain._thread.is_alive()
    steps = list(precdoctor.open_run(tmp_path / "run").events()["step"])
    assert steps == sorted(steps)
    assert steps[-1] == next(puts) - 1  # the call that came through
    assert lines > 3


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("name", ["end_step", "_hand_over"])
def test_a_step_interrupted_as_it_is_handed_over_is_logged_once(tmp_path, name, goes_on):
    for line in range(1 if goes_on else 20):
        run = tmp_path / str(line)
        create_run(run, {"command": []})
        recorder = Recorder(run, RecordOptions())
        assert recorder.arm()
        recorder.claim.make()

        def step(recorder=recorder):
            recorder.current.losses.append(1.0)
            recorder.end_step()

        if goes_on:
            assert interrupted(step, getattr(Recorder, name).__code__) > 4
        elif not interrupted_once(step, getattr(Recorder, name).__code__, line):
            recorder.close()
            break
        recorder.close()
        steps = precdoctor.open_run(run).steps()
        assert list(steps["step"]) == list(range(len(steps)))
        assert steps["complete"].all() or not goes_on
        assert len(steps) == 1 or goes_on
    assert goes_on or line > 4


@pytest.mark.parametrize("name", ["open", "close"])
def test_anomaly_mode_is_never_left_on(name):
    loss_code = LossCode.__new__(LossCode)
    loss_code.running, loss_code._context = False, type("Context", (), {"trace": None})()

    def around():
        try:
            loss_code.open()
        finally:
            loss_code.close()

    try:
        interrupted(around, getattr(LossCode, name).__code__)
        assert not torch.is_anomaly_enabled()
    finally:
        torch.set_anomaly_enabled(False)


def test_every_wide_except_clause_lets_the_users_exceptions_through():
    """Each names ``let_through``, hands the error on to what does, or raises; as the log is closed, it is logged."""
    lets = {"let_through", "internal_error", "_fail", "cannot_begin", "_log_error"}
    for path in RECORDING.rglob("*.py"):
        if path.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler) or not WIDE & caught(node):
                continue
            body = [n for part in node.body for n in ast.walk(part)]
            names = {getattr(n, "attr", getattr(n, "id", None)) for n in body}
            assert names & lets or any(isinstance(n, ast.Raise) for n in body), f"{path.name}:{node.lineno}"


def caught(node: ast.ExceptHandler) -> set[str]:
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return {kind.id for kind in kinds if isinstance(kind, ast.Name)}


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


def test_getting_ready_is_not_interrupted_again_and_again(tmp_path, handler, monkeypatch):
    from precdoctor.recording.output import drain

    made = []

    class Interrupted(drain.Drain):
        def __init__(self, *args, **kwargs):
            handler()  # as a timer would that is shorter than this takes
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(drain, "Drain", Interrupted)
    create_run(tmp_path / "run", {"command": []})
    recorder = Recorder(tmp_path / "run", RecordOptions())
    assert recorder.arm()
    with pytest.raises(Timeout):
        recorder.claim.make()
    assert recorder.drain is not None or made, "what was begun is done when the script hears of its signal"
    assert recorder.claim.make()
    recorder.close()
    assert len(made) == 1
    assert [d.name for d in (tmp_path / "run").glob("rank-*")] == ["rank-00000"]


def test_the_import_of_torch_does_not_end_by_an_interruption(handler, monkeypatch):
    from precdoctor import _boot
    from precdoctor.recording import installation

    installed, notes = [], []
    monkeypatch.setattr(installation, "install", lambda: (handler(), installed.append(1)))
    monkeypatch.setattr(_boot, "note", lambda *told: notes.append(told[1]))
    _boot._torch_is_here()
    assert installed == [1]
    assert notes == ["torch"]
    with pytest.raises(Timeout):
        time.sleep(10)


def test_held_signals_leave_the_handlers_as_they_were(handler):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with pytest.raises(Timeout), HeldSignals():
        handler()
        handler()
        reached = True
    assert reached
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    with HeldSignals():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "what the script set meanwhile stays"
