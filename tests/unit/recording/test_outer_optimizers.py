"""Steps of DeepSpeed's and Megatron's kind: what is told of them as they begin and end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from precdoctor.recording.steps.outer_optimizers import OuterOptimizers


class Outer:
    """An optimizer around one of torch's, which found an overflow in its last step."""

    def __init__(self):
        self.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        self.overflow = True

    def step(self, *, fails=False):
        if fails:
            raise ConnectionError("a rank is gone")
        return "stepped"


@pytest.fixture
def told(monkeypatch):
    """What was told of the ends of its steps: the optimizer inside, whether the step was skipped."""
    none = SimpleNamespace(others=set())
    recorder = SimpleNamespace(state="armed", capture=SimpleNamespace(runs=False), claim=SimpleNamespace(make=list))
    recorder.when_forked, recorder.threads, recorder.on_the_clock = [], none, False
    recorder.current, recorder.internal_error = SimpleNamespace(recorder_ns=0, wait_ns=0), pytest.fail
    ends = []
    outer = OuterOptimizers(recorder, lambda scale: None, lambda inner, skipped, norm: ends.append((inner, skipped)))
    monkeypatch.setattr(Outer, "step", outer._stepping(Outer.step))
    return ends


def test_a_step_tells_what_the_library_found(told):
    outer = Outer()
    assert outer.step() == "stepped" and told == [(outer.optimizer, True)]


def test_a_step_that_raises_tells_nothing_of_the_step_before(told):
    outer = Outer()
    with pytest.raises(ConnectionError):
        outer.step(fails=True)
    assert told == [(outer.optimizer, None)]
