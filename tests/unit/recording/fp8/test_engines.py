"""Attributes of frameworks that are not installed here, on stand-ins that have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from precdoctor.recording.fp8.engine_scales import delayed_scaling


def state(operands, length=4):
    history = torch.arange(float(operands * length)).reshape(length, operands)
    return SimpleNamespace(scale=torch.arange(1.0, operands + 1), amax_history=history)


def module(**meta):
    made = nn.Linear(2, 2)
    made.fp8_meta = meta
    return made


def test_one_scale_and_one_history_per_operand():
    found = dict(delayed_scaling(module(scaling_fwd=state(3), scaling_bwd=state(2), recipe="delayed")))
    assert list(found)[:3] == ["input.scale", "weight.scale", "output.scale"]
    assert float(found["weight.scale"]) == 2.0
    assert found["grad_input.amax_history"].tolist() == [1.0, 3.0, 5.0, 7.0]


def test_several_products_are_numbered():
    names = [name for name, _ in delayed_scaling(module(scaling_fwd=state(6)))]
    assert names[:4] == ["gemm1.input.scale", "gemm1.weight.scale", "gemm1.output.scale", "gemm2.input.scale"]


@pytest.mark.parametrize("meta", [{}, {"scaling_fwd": None}, {"scaling_fwd": SimpleNamespace(scale=None)}])
def test_recipes_that_keep_no_history_have_nothing_to_read(meta):
    assert list(delayed_scaling(module(**meta))) == []
    assert list(delayed_scaling(nn.Linear(2, 2))) == []
