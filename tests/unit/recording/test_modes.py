"""Modes of ours leave torch's stack, whatever lies on it, and wherever they are told to."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.deepscan.window import StepWindow
from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.microscope.live import LiveTrace
from precdoctor.recording.model.module_names import Names
from precdoctor.recording.ops.dispatched_ops import Retiring, in_backward, put_on, retire, retired, sweep, take_off


class Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def depth() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_from_below_another():
    ours, theirs = Counting(), Counting()
    ours.__enter__()
    with theirs:
        take_off(ours)
        assert depth() == 1
        torch.ones(2)
    assert (ours.ops, theirs.ops, depth()) == (0, 1, 0)


def test_what_is_not_open_stays_so():
    with Counting() as theirs:
        take_off(Counting())
        torch.ones(2)
    assert (theirs.ops, depth()) == (1, 0)


def test_what_is_put_on_twice_is_there_once():
    """A second one would stay on the stack, which does not keep its modes alive in old releases of torch."""
    ours = Counting()
    put_on(ours)
    put_on(ours)
    assert depth() == 1
    take_off(ours)
    assert depth() == 0


class Retired(Retiring):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_one_that_another_thread_closes_stays_alive_until_its_own_takes_it_off():
    opened, closed = threading.Event(), threading.Event()
    seen: list[Any] = []

    def train() -> None:
        mode = Retired()
        alive = weakref.ref(mode)
        modes.append(mode)
        put_on(mode)
        del mode
        opened.set()
        closed.wait()
        seen.extend((alive() is not None, len(retired()), depth()))
        sweep()
        gc.collect()
        seen.extend((alive() is not None, len(retired()), depth()))

    modes: list[Retired] = []
    other = threading.Thread(target=train)
    other.start()
    opened.wait()
    retire(modes.pop())
    closed.set()
    other.join()
    assert seen == [True, 1, 1, False, 0, 0]


def traced() -> LiveTrace:
    options, names = SimpleNamespace(redact_names=False, inference=False), Names()
    recorder: Any = SimpleNamespace(step=0, micro_step=0, options=options, names=names, when_forked=[])
    return LiveTrace(recorder, (0, 9), lambda: None)


def test_a_step_that_ends_in_the_backward_pass_leaves_no_mode_behind_it():
    weight = torch.ones(3, requires_grad=True)
    trace, seen = traced(), []

    def hook(_p: torch.Tensor) -> None:
        assert in_backward()
        trace.end()
        trace.begin_if_due()  # the next step's
        seen.append(trace.running)

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        trace.begin_if_due()
        assert (trace.running, depth(), in_backward()) == (True, 1, False)
        (weight * 2).sum().backward()
        sweep()
        assert (trace.running, depth()) == (False, 0)
    assert seen == [False] * 3


def test_what_runs_behind_the_end_is_not_in_the_trace():
    weight = torch.ones(3, requires_grad=True)
    trace = traced()
    trace.begin_if_due()
    tracer = trace._tracer
    assert tracer is not None
    counts: list[int] = []

    def hook(p: torch.Tensor) -> None:
        trace.end()
        counts.append(len(tracer.records))
        p.detach().mul(2.0)

    weight.register_post_accumulate_grad_hook(hook)
    (weight * 2).sum().backward()
    sweep()
    assert counts == [len(tracer.records)] and counts[0] > 0


class Watched(WindowMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_module_that_a_closed_window_meets_does_not_return_to_the_next_window():
    """Hooks that torch has chosen for a call still run in it after they have been removed."""
    facts = SimpleNamespace(step=1, recorder_ns=0, wait_ns=0, scan_ns=0)
    context: Any = SimpleNamespace(
        current=facts, micro_step=0, options=SimpleNamespace(first_step=0), names=Names(), evidence=False, trace=None,
        on_the_clock=False, threads=SimpleNamespace(others=False), internal_error=raised,
    )  # fmt: skip
    watcher: Any = SimpleNamespace(
        off=False, without_modules=True, mode=lambda step: Watched(), ended=lambda mode: None
    )
    watcher.forget = lambda: None
    window, module = StepWindow(context, [watcher]), torch.nn.Linear(1, 1)
    for expected in (0, 1):  # nothing of the first step's module is left in the second
        window.begin_step()
        assert depth() == 1
        if not expected:
            window._close()
        before, after = window._hooks
        before(module, ())
        assert depth() == 0
        after(module, (), None)
        assert depth() == expected
        window.end_step()
        assert depth() == 0
        facts.step += 1


def raised(error: Exception) -> None:
    raise error
