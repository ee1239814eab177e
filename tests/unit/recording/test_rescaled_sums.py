"""Factors between the backward passes of a step: equal ones are counted, others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from precdoctor.recording.slots.deferred import Arriving
from precdoctor.recording.steps import rescaled_sums
from precdoctor.recording.steps.rescaled_sums import RescaledSums


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 64, 1000)]


def steps(
    sums: RescaledSums,
    change: Callable[[Tensor, int, int], Tensor | None],
    *,
    passes: int = 3,
    clip_norm: float | None = None,
    count: int = 4,
    dtype: torch.dtype = torch.float32,
) -> list[bool]:
    """Steps of several passes; ``change`` makes a gradient's new value from the old one, the step and the pass."""
    owned, reports = parameters(dtype), []
    for step in range(count):
        for i in range(passes):
            if sums.expected:
                sums.measure()
            for p in owned:
                new = torch.randn_like(p)
                p.grad = new if p.grad is None else p.grad + new
            if sums.expected:
                sums.measure(owned)
            for p in owned:
                assert p.grad is not None
                p.grad = change(p.grad, step, i)
        if sums.expected:
            sums.measure()
        reports.append(sums.step_ended(passes, clip_norm))
        for p in owned:
            p.grad = None
    return reports


def test_a_division_after_each_pass_is_counted_and_reported_once():
    sums = RescaledSums()
    assert steps(sums, lambda g, *_: g / 256.0) == [False, True, False, False]
    data = sums.found()
    assert data is not None
    assert data["factor"] == pytest.approx(1 / 256, rel=1e-5)
    assert (data["passes"], data["steps"], data["of"]) == (3, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_formats_are_measured(dtype: torch.dtype):
    sums = RescaledSums()
    steps(sums, lambda g, *_: g / 256.0, dtype=dtype)
    data = sums.found()
    assert data is not None and data["steps"] == 3
    assert data["factor"] == pytest.approx(1 / 256, rel=1e-2)


def test_norms_that_a_device_still_computes_are_left_for_later(monkeypatch):
    class Event:
        passed = False

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            waited.append(True)

    waited: list[bool] = []
    monkeypatch.setattr(rescaled_sums, "deferred", lambda x: Arriving(cast(torch.cuda.Event, Event()), x))
    monkeypatch.setattr(Tensor, "is_cpu", False)
    sums = RescaledSums()
    assert not any(steps(sums, lambda g, *_: g / 256.0, count=6))
    assert waited == []  # each step looks whether they are there
    Event.passed = True
    assert steps(sums, lambda g, *_: g / 256.0) == [True, False, False, False]
    Event.passed = False
    data = sums.found()
    assert data is not None and (data["steps"], data["of"]) == (4, 4)
    assert waited == [True]  # nothing trains any more


def test_only_the_first_of_many_passes_are_measured():
    sums = RescaledSums()
    steps(sums, lambda g, _, i: g / 4.0 if i < 32 else g, passes=40)
    data = sums.found()
    assert data is not None and (data["passes"], data["steps"]) == (40, 3)


def test_the_factor_may_differ_from_step_to_step():
    sums = RescaledSums()
    steps(sums, lambda g, step, _: g / 2.0**step)
    data = sums.found()
    assert data is not None and data["steps"] == 3
    assert data["factor"] == pytest.approx(1 / 8, rel=1e-5)


def test_a_clip_after_the_last_division_is_left_out():
    sums = RescaledSums()
    steps(sums, lambda g, _, i: g / (16.0 if i < 2 else 16.0 * 1.7), clip_norm=1.0)
    data = sums.found()
    assert data is not None and data["steps"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda g, *_: g,
        lambda g, _, i: g / 4096.0 if i == 2 else g,  # once, after the last pass
        lambda g, _, i: g / 2.0 if i < 2 else g,  # between the passes only
        lambda g, _, i: g * i / (i + 1) if i else g,  # a running mean
        lambda g, *_: g / g.norm(),
        lambda g, *_: torch.zeros_like(g),
        lambda g, _, i: None if i < 2 else g,
        lambda g, _, i: g * float("inf") if i == 1 else g,
    ],
)
def test_others_are_not_counted(change):
    sums = RescaledSums()
    assert not any(steps(sums, change))
    assert sums.found() is None


@pytest.mark.parametrize("kinds", [(), (torch.zeros(2, dtype=torch.int64),)])
def test_parameters_without_gradients_are_no_trouble(kinds: Sequence[Tensor]):
    sums = RescaledSums()
    sums.step_ended(2, None)
    sums.measure(kinds)
    assert not sums.step_ended(2, None)


def test_one_pass_a_step_is_not_measured():
    sums = RescaledSums()
    steps(sums, lambda g, *_: g / 2.0, passes=1)
    assert not sums.expected and sums.found() is None
