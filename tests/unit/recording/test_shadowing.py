"""Errors, and what makes every op compute in a wide format."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from precdoctor.errors import UsageError
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.scene.state_restore import attributes_aside
from precdoctor.recording.shadowing import wide_replay
from precdoctor.recording.shadowing.relative_errors import ratio, relative_l2
from precdoctor.recording.shadowing.wide_replay import RefusedError, Watching, Widened

finite = st.floats(-(2.0**10), 2.0**10, width=32).filter(lambda x: x == 0.0 or abs(x) > 2.0**-10)


@given(st.lists(finite, min_size=1, max_size=20), st.lists(finite, min_size=20, max_size=20), st.integers(-8, 8))
def test_the_error_is_relative_whatever_the_scale(values, other, power):
    x, y = torch.tensor(values), torch.tensor(other[: len(values)])
    error = relative_l2(x, y)
    expected = float((x.double() - y.double()).norm() / y.double().norm()) if y.any() else (math.inf if x.any() else 0)
    assert error == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert relative_l2(x * 2.0**power, y * 2.0**power) == pytest.approx(error, rel=1e-6)


def test_masks_are_left_out_and_overflows_are_not():
    reference = torch.tensor([1.0, 2.0, -math.inf])
    assert relative_l2(torch.tensor([1.0, 2.0, -math.inf], dtype=torch.bfloat16), reference) == 0.0
    assert relative_l2(torch.tensor([1.0, math.inf, -math.inf]), reference) == math.inf
    assert math.isnan(relative_l2(torch.ones(2), torch.ones(3)))
    assert relative_l2(torch.ones(2), torch.zeros(2)) == math.inf and relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0


def test_one_rounding_to_bf16_is_two_fifths_of_a_unit():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert relative_l2(x.bfloat16(), x) * 2**8 == pytest.approx(0.42, abs=0.02)


def test_what_cancels_is_told_by_turning_signs_round():
    assert ratio(torch.tensor([3.0, 4.0]), torch.tensor([0.5, 0.0])) == 10.0
    assert ratio(torch.ones(2), torch.zeros(2)) == math.inf and ratio(torch.zeros(2), torch.zeros(2)) == 0.0


def narrow(x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
    """Everything that asks for half precision by itself."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    total += x.half().to(total.dtype) @ w.to(torch.bfloat16).t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = total + nn.functional.linear(x, w)
    return total.softmax(-1, dtype=torch.float16)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_every_op_is_widened_and_so_is_its_gradient(wide):
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(3, 8).to(wide))
    with Widened(wide, []):
        y = narrow(x.to(wide), w)
        y.square().sum().backward()
    logits = x.double() @ w.double().t() * 2
    expected = logits.softmax(-1)
    assert y.dtype == wide
    assert relative_l2(y, expected) < (1e-6 if wide is torch.float32 else 1e-7)
    assert w.grad.dtype == wide
    (grad,) = torch.autograd.grad((x.double() @ w.double().t() * 2).softmax(-1).square().sum(), w)
    assert relative_l2(w.grad, grad) < 1e-5


@pytest.mark.parametrize("inference", [False, True])  # in which modes see dropout itself, as other torches show it
def test_the_reference_gets_the_random_numbers_of_the_run(inference):
    @torch.inference_mode(inference)
    def forward(x):
        noise = torch.rand_like(x) + torch.bernoulli(x.sigmoid()) + torch.empty_like(x).normal_()
        return nn.functional.dropout((x + noise).abs() + 1, 0.5, training=True)  # no zero but dropout's

    x = torch.randn(64, dtype=torch.bfloat16)
    watching = Watching()
    with watching:
        first = forward(x)
    torch.manual_seed(999)  # somebody has drawn since
    widened = Widened(torch.float32, watching.draws)
    with widened:
        second = forward(x)
    assert widened.same_draws and second.dtype == torch.float32
    assert torch.equal(first == 0, second == 0) and relative_l2(first, second) < 4 * 2**-8
    assert watching.dtypes == {torch.bfloat16}


def test_other_draws_are_noticed():
    watching = Watching()
    with watching:
        torch.rand(3)
    widened = Widened(torch.float32, watching.draws)
    with widened:
        assert torch.rand(4).shape == (4,)
    assert not widened.same_draws


def test_a_generator_of_ones_own_is_refused_before_it_is_drawn_from():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    with pytest.raises(RefusedError), Watching():
        torch.rand(3, generator=generator)
    assert torch.equal(generator.get_state(), state)


def test_widened_state_is_put_aside_and_never_written_to():
    module = nn.Sequential(nn.LSTM(4, 4), nn.BatchNorm1d(4)).bfloat16()
    module[1].bank = torch.zeros(3)
    before = {n: (id(p), p.dtype, p.detach().clone()) for n, p in [*module.named_parameters(), *module.named_buffers()]}
    flat, bank = module[0]._flat_weights, module[1].bank
    modules = list(module.modules())
    with attributes_aside(modules), wide_replay.widened_state(modules, torch.float32) as made:
        assert {p.dtype for p in module.parameters()} == {torch.float32} == {p.dtype for p in module[0]._flat_weights}
        assert len(made) == len(list(module.parameters()))
        module[1].bank += 1
    after = {n: (id(p), p.dtype, p.detach()) for n, p in [*module.named_parameters(), *module.named_buffers()]}
    assert module[0]._flat_weights is flat and module[1].bank is bank and not bank.any()
    for name, (identity, dtype, value) in before.items():
        assert (identity, dtype) == after[name][:2] and torch.equal(value, after[name][2])


@pytest.mark.parametrize("bad", [{"shadow": "fp16"}, {"shadow_every": 0}, {"shadow_at": (-1,)}])
def test_options_that_cannot_be_taken(bad):
    with pytest.raises(UsageError):
        RecordOptions(**bad)


def switches() -> list[str]:
    cuda, cudnn, cpu = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    kinds = torch.backends, cudnn, cuda.matmul, cudnn.conv, cudnn.rnn, cpu.matmul
    return [kind.fp32_precision for kind in kinds]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has no such switch")
@pytest.mark.parametrize("of_all", [False, True])
def test_products_are_full_where_a_script_uses_the_newer_switches_of_tf32(of_all):
    """Torch refuses to read the older ones then."""
    before = switches()
    holder = torch.backends if of_all else torch.backends.cuda.matmul
    try:
        holder.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        chosen = switches()
        with wide_replay.full_precision([]):
            assert not {"tf32", "bf16"} & set(switches()[2:])
        assert switches() == chosen
        holder.fp32_precision = "none"  # what has followed the switch for all follows it still
        assert switches() == before
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        holder.fp32_precision = "none"


def test_products_are_full_where_a_script_uses_the_older_switch():
    torch.set_float32_matmul_precision("high")
    try:
        with wide_replay.full_precision([]):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has no such switch")
def test_tf32_is_reported_where_a_script_uses_the_newer_switches(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert wide_replay.reduced_products() == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
