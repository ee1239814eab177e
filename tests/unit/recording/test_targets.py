"""What outlives a step is read where nobody else can be writing to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.model.module_names import Names
from precdoctor.recording.ops.dispatched_ops import storage_key


@pytest.mark.parametrize("others", [set(), {7}])
def test_no_gradient_is_read_while_other_threads_use_models(others):
    model, names = nn.Linear(2, 2), Names()
    names.place(model, None)
    next(iter(names.roots.values())).trained = True
    model.weight.grad = torch.zeros(2, 2)
    targets = Targets(names, threads=SimpleNamespace(others=others))
    assert targets.zero_gradients() == ([] if others else ["weight"])
    assert len(targets.gradients(9)) == (0 if others else 1)
    assert targets.of(storage_key(model.weight))["target"] == ("state" if others else "weight")
