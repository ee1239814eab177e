"""Hand-written loss scales: found where there is one, and only there."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.recording.output.step_rows import ClipOrders, LossScales, _grad_norm, _sum, infer_loss_scale
from precdoctor.recording.slots.step_batch import StepBatch, StepFacts
from precdoctor.recording.steps.scaled_losses import constant_factor

POWERS = st.integers(4, 24).map(lambda k: 2.0**k)
ORDERS = ClipOrders()
ORDINARY = st.floats(1e-3, 1e3, allow_nan=False).filter(lambda x: x > 0)


def around(value: float, spread: float):
    return st.lists(st.floats(value * (1 - spread), value * (1 + spread)), min_size=2, max_size=20)


@given(POWERS | st.sampled_from([100.0, 1000.0, 12345.0]), st.data())
def test_a_factor_that_the_gradients_were_divided_by(scale, data):
    ratios = data.draw(around(scale, 1e-4))
    assert infer_loss_scale([scale], ratios, clipped=False) == scale
    assert infer_loss_scale([scale] * 4, ratios, clipped=False) == scale


@given(POWERS, st.floats(1.0, 1e4), st.data())
def test_clipping_divides_once_more(scale, clip, data):
    ratios = data.draw(around(scale * clip, 1e-4))
    assert infer_loss_scale([scale], ratios, clipped=True) == scale


@given(st.sampled_from([100.0, 1000.0, 12345.0]), st.floats(1.0, 1e4), st.data())
def test_a_factor_that_the_gradients_were_divided_by_beside_a_known_clip(scale, clip, data):
    ratios = data.draw(around(scale * clip, 1e-4))
    assert infer_loss_scale([scale], ratios, clipped=True, shrunk=clip) == scale
    assert infer_loss_scale([scale], ratios, clipped=True, shrunk=1.5 * clip) is None


@given(POWERS.filter(lambda x: x >= 64))
def test_division_alone_shows_it_when_it_is_an_exact_power_of_two(scale):
    assert infer_loss_scale([], [scale] * 3, clipped=False) == scale
    assert infer_loss_scale([], [scale] * 3, clipped=True) is None  # a clip could have done that
    assert infer_loss_scale([], [scale], clipped=False) is None  # one parameter proves little


@given(ORDINARY, st.data())
def test_a_weight_on_the_loss_is_no_scale(weight, data):
    """Nobody divided the gradients by it."""
    assert infer_loss_scale([weight], data.draw(around(1.0, 1e-6)), clipped=False) is None


@given(st.floats(1.0, 1e6), ORDINARY.filter(lambda x: x < 16 or not float(x).is_integer()), st.data())
def test_a_weight_on_a_loss_whose_gradients_are_clipped_is_no_scale(clip, weight, data):
    assert infer_loss_scale([weight], data.draw(around(clip, 1e-6)), clipped=True) is None


@given(st.lists(st.floats(0.05, 20.0), min_size=3, max_size=30))
def test_averaging_over_ranks_is_no_scale(ratios):
    assert infer_loss_scale([], ratios, clipped=False) is None
    assert infer_loss_scale([0.25], ratios, clipped=False) is None


@given(POWERS.filter(lambda x: x >= 256), st.lists(st.floats(0.5, 4.0), min_size=3, max_size=30))
def test_a_scale_is_seen_through_averaging_over_ranks(scale, changes):
    assert infer_loss_scale([scale], [scale * c for c in changes], clipped=False) == scale


def test_factors_that_differ_between_micro_steps_are_weights():
    assert infer_loss_scale([64.0, 128.0], [], clipped=False) is None
    assert infer_loss_scale([65536.0] * 2, [], clipped=False) == 65536.0
    assert infer_loss_scale([1000.0], [], clipped=False) is None
    assert infer_loss_scale([], [], clipped=False) is None


def step(sampled: bool, factors: list[float], **more) -> StepBatch:
    return StepBatch(StepFacts(0, sampled=sampled, complete=True, root_factors=factors, **more), [], {})


def test_steps_between_sampled_ones_go_by_what_those_have_shown():
    scales = LossScales()
    assert scales.of(step(False, [1024.0]), []) == (None, False)
    assert scales.of(step(True, [1024.0]), [1024.0] * 2) == (1024.0, True)
    assert scales.of(step(False, [512.0]), []) == (512.0, True)  # a hand-written backoff
    assert scales.of(step(False, []), []) == (1024.0, True)
    assert scales.of(step(True, [32.0]), [1.0] * 2) == (None, False)
    assert scales.of(step(False, [32.0]), []) == (None, False)


def test_a_scale_above_master_copies_may_grow_by_any_factor():
    scales = LossScales()
    assert scales.of(step(True, [2.0**20]), []) == (2.0**20, True)  # no ratios: the optimizer has other tensors
    assert scales.of(step(True, [2.0**20.001]), []) == (2.0**20.001, True)
    assert scales.of(step(False, [2.0**20.002]), []) == (2.0**20.002, True)
    assert scales.of(step(True, []), []) == (None, False)
    assert scales.of(step(True, [3000.0]), []) == (None, False)  # nothing says that this is one


def test_a_grad_scaler_is_believed():
    assert LossScales().of(step(True, [2.0], loss_scale=8.0), [4.0] * 2) == (8.0, False)


@pytest.mark.parametrize(
    ("expression", "factor"),
    [
        (lambda x: x * 65536, 65536.0),
        (lambda x: 65536 * x, 65536.0),
        (lambda x: x * torch.tensor(128.0), 128.0),
        (lambda x: x / 4, None),
        (lambda x: x * x.exp(), None),
        (lambda x: x + 1, None),
        (lambda x: x.detach(), None),
    ],
)
def test_the_factor_at_the_root_of_a_graph(expression, factor):
    loss = torch.nn.Parameter(torch.ones(3)).sum()
    assert constant_factor(expression(loss)) == factor


def left_out(factors: list[float]) -> StepBatch:
    return StepBatch(StepFacts(0, complete=True, sampled=True, left_out=True, root_factors=factors), [], {})


def test_a_step_that_was_left_out_says_its_scale_by_the_loss_alone():
    scales = LossScales()
    assert scales.of(left_out([2.0**16]), []) == (2.0**16, True)
    assert scales.of(left_out([]), []) == (2.0**16, True)  # it need not be readable
    assert scales.of(left_out([3000.0]), []) == (3000.0, True)  # where there is a scale, it may have moved
    assert LossScales().of(left_out([3000.0]), []) == (None, False)


def clipped(order: float | None) -> StepFacts:
    """A step with a clip; ``order``: by how much the norm of gradients had been divided before it."""
    known = {"gradients_of": frozenset(), "norm_at_clip": (8192.0 / order, frozenset())} if order else {}
    facts = StepFacts(0, complete=True, sampled=bool(order), grad_norm=2048.0, grad_amax=1.0, clip_norm=1.0, **known)
    tensors = types.SimpleNamespace(weight_gradients=lambda _: ([8192.0**2], True))
    ORDERS.settle(facts, tensors, 1024.0)
    return facts


@pytest.mark.parametrize(("order", "early", "norm"), [(1.0, True, 2.0), (1024.0, False, 2048.0), (32.0, None, None)])
def test_a_norm_between_samples_is_dropped_if_nothing_shows_whether_it_is_scaled(order, early, norm):
    assert clipped(order).clipped_before_unscale is early
    between = clipped(None)
    assert between.clipped_before_unscale is None
    assert _grad_norm(StepBatch(between, [], {}), None, 1024.0) == norm


def test_losses_beyond_fp64_sum_to_infinity():
    assert _sum([1e308, 1e308], None) == float("inf")
    assert _sum([1.0, 2.0], 2.0) == 1.5


@pytest.mark.parametrize(("norm", "amax", "seen"), [(3.0, None, 3.0), (3.0, 2.0, 3.0), (3.0, float("inf"), None)])
def test_a_library_gives_the_norm_of_the_gradients_without_their_largest(norm, amax, seen):
    facts = StepFacts(0, complete=True, sampled=False, grad_norm=norm, grad_amax=amax)
    found = _grad_norm(StepBatch(facts, [], {}), None, None)
    assert found == seen or (seen is None and found != found)
