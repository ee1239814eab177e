"""An optimizer's step run again on copies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from precdoctor.recording.microscope.optimizer_replay import SpoiltStep, bad_settings


def replayed(optimizer, parameter, before):
    return SpoiltStep(optimizer, {id(parameter): before}, None, values=True).replay(parameter)


def stepped(kind, gradient, **how):
    parameter = nn.Parameter(torch.ones(3, dtype=how.pop("dtype", torch.float32)))
    before = parameter.detach().clone()
    optimizer = kind([parameter], **how)
    parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    optimizer.step()
    return optimizer, parameter, before


@pytest.mark.parametrize(
    ("kind", "gradient", "how", "op"),
    [
        (torch.optim.Adam, [0.0, 1.0, 1.0], {"eps": 0.0}, "aten.addcdiv_.default"),
        (torch.optim.Adam, [1e-5] * 3, {"dtype": torch.float16}, "aten.addcdiv_.default"),
        (torch.optim.SGD, [1e30] * 3, {"lr": 1e30}, "aten.add_.Tensor"),
        (torch.optim.RMSprop, [0.0, 1.0, 1.0], {"eps": 0.0}, "aten.addcdiv_.default"),
    ],
    ids=["eps-0", "eps-flushed", "rate", "rmsprop"],
)
def test_the_operation_is_found_and_nothing_is_touched(kind, gradient, how, op):
    optimizer, parameter, before = stepped(kind, gradient, **how)
    bits, state = (
        parameter.detach().clone(),
        {k: v.clone() for k, v in optimizer.state[parameter].items() if v is not None},
    )
    random = torch.get_rng_state()
    found = replayed(optimizer, parameter, before)
    assert found is not None and found.origin is not None
    assert found.origin.op == op
    assert torch.equal(parameter.nan_to_num(7.0), bits.nan_to_num(7.0))
    assert all(torch.equal(optimizer.state[parameter][k].nan_to_num(7.0), v.nan_to_num(7.0)) for k, v in state.items())
    assert torch.equal(torch.get_rng_state(), random)


class Whitened(torch.optim.SGD):
    """Shampoo's way: state in lists and dictionaries, written in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, sums=[torch.zeros(3), torch.zeros(3)], roots={"left": torch.ones(3)})
            state["step"] += 1
            state["sums"][0] += p.grad
            state["sums"][1].mul_(0.9).add_(p.grad)
            state["roots"]["left"] = state["sums"][0].pow(-0.25)
            p.add_(state["roots"]["left"] * state["sums"][1], alpha=-0.1)


def test_state_in_containers_is_copied_too():
    optimizer, parameter, before = stepped(Whitened, [1.0, -1e-12, 0.0], lr=0.1)
    state = optimizer.state[parameter]
    bits = [x.clone() for x in (*state["sums"], state["roots"]["left"], parameter.detach())]
    found = replayed(optimizer, parameter, before)

    assert found is not None and found.origin is not None
    assert found.origin.op == "aten.pow.Tensor_Scalar"
    now = (*state["sums"], state["roots"]["left"], parameter.detach())
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(now, bits, strict=True))


def test_an_optimizer_that_writes_elsewhere_is_left_alone():
    elsewhere = torch.zeros(3)

    class Leaky(torch.optim.SGD):
        def step(self, closure=None):
            elsewhere.add_(1.0)
            return super().step(closure)

    optimizer, parameter, before = stepped(Leaky, [1e30] * 3, lr=1e30)
    assert torch.equal(elsewhere, torch.ones(3))
    assert replayed(optimizer, parameter, before) is None
    assert torch.equal(elsewhere, torch.ones(3))


def test_a_step_that_comes_out_finite_says_nothing():
    optimizer, parameter, before = stepped(torch.optim.SGD, [1.0] * 3, lr=0.1)
    assert replayed(optimizer, parameter, before) is None


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"lr": math.nan}, ["lr"]),
        ({"lr": np.float32("nan")}, ["lr"]),
        ({"lr": torch.tensor(math.inf)}, ["lr"]),
        ({"weight_decay": math.inf, "lr": 0.1}, ["weight_decay"]),
        ({"betas": (0.9, math.nan)}, ["betas[1]"]),
        ({"anything": math.nan}, ["anything"]),
        ({"max_norm": math.inf}, []),
        ({"lr": 1e300, "maximize": True, "foreach": None, "betas": (0.9, 0.99)}, []),
    ],
    ids=str,
)
def test_settings_that_spoil_an_update_are_told_by_group_and_name(settings, names):
    good, bad = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [good]}, {"params": [bad]}], lr=0.1)
    optimizer.param_groups[1].update(settings)

    assert [(s["group"], s["name"]) for s in bad_settings(optimizer, [bad])] == [(1, n) for n in names]
    assert bad_settings(optimizer, [good]) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_operation_a_rate_of_nan_went_into(kind):
    optimizer, parameter, before = stepped(kind, [1.0] * 3)
    optimizer.param_groups[0]["lr"] = math.nan
    optimizer.step()
    found = replayed(optimizer, parameter, before)

    assert found is not None and found.origin is not None
    assert any(math.isnan(v) for v in found.origin.facts["settings"].values() if isinstance(v, float))


def test_momentum_that_overflows_by_and_by_is_led_to_the_operation():
    """Every gradient is finite, and so is the momentum for some steps: from 0 the step comes out finite."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1e-6, momentum=0.9)
    while parameter.isfinite().all():
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([1.0, 1.1e4, 1.0]).half()
        optimizer.step()
    found = replayed(optimizer, parameter, before)

    assert found is not None and found.origin is not None
    assert found.origin.op == "aten.add_.Tensor"
    assert optimizer.state[parameter]["momentum_buffer"].tolist()[1] == math.inf


class Climber(torch.optim.SGD):
    """Climbs along the gradient before its closure computes another (sharpness-aware minimisation)."""

    @torch.no_grad()
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        scale = 0.05 / torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad * scale)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize(("gradient", "found"), [(0.0, True), (1.0, False)], ids=["zero", "finite"])
def test_a_step_with_a_closure_is_run_up_to_that(gradient, found):
    calls = []
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for p in parameters:
        p.grad = torch.full_like(p, gradient)
    given = [(p, p.grad) for p in parameters]

    def closure():
        calls.append(1)
        sum(p.sum() for p in parameters).backward()

    optimizer = Climber(parameters, lr=0.1)
    optimizer.step(closure)
    bits = [p.detach().nan_to_num(7.0) for p in parameters]
    done = SpoiltStep(optimizer, {}, None, values=True).replay_until_closure(given)

    assert len(calls) == 1
    assert (done is not None) is found
    if done is not None:
        assert done.origin.op in {"aten.reciprocal.default", "aten.div.Tensor"}
        assert done.origin.line.file == __file__
    assert all(torch.equal(p.detach().nan_to_num(7.0), b) for p, b in zip(parameters, bits, strict=True))
