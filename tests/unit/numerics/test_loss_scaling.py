"""The simulated scaler against torch's own, and what a step says about scales it was not run with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics.formats import BF16, E5M2, FP16
from precdoctor.numerics.loss_scaling import ScalerPolicy, ScalerState, search, simulate
from precdoctor.numerics.step_gradients import OverflowLimit, StepGradients
from tests.support.references import histogram_of


def torch_trajectory(policy: ScalerPolicy, overflows: list[bool]) -> list[tuple[float, int]]:
    """Scale and growth tracker before each step and after the last, of the real thing."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=policy.init, growth_factor=policy.growth, backoff_factor=policy.backoff,
        growth_interval=policy.interval,
    )  # fmt: skip
    trajectory = [(policy.start().scale, 0)]
    for overflow in overflows:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([math.inf if overflow else 0.5])
        scaler.step(optimizer)
        scaler.update()
        trajectory.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return trajectory


def forced(overflows: list[bool]) -> list[StepGradients]:
    """Steps that overflow, or do not, at any scale."""
    return [
        StepGradients(i, OverflowLimit.always() if bad else OverflowLimit(math.inf, math.inf, math.inf))
        for i, bad in enumerate(overflows)
    ]


policies = st.builds(
    ScalerPolicy,
    init=st.sampled_from([65536.0, 1.0, 3.3, 2.0**127, 2.0**-140, 1e-45, 2.0**24]),
    growth=st.sampled_from([2.0, 1.5, 1.0001, 10.0, 1.1]),
    backoff=st.sampled_from([0.5, 0.7, 0.1, 0.999]),
    interval=st.integers(1, 6),
)


@given(policy=policies, overflows=st.lists(st.booleans(), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_scale_and_growth_tracker_are_torch_s_bit_for_bit(policy, overflows):
    replay = simulate(policy, forced(overflows))
    mine = [(s.scale, s.growth_tracker) for s in replay.steps] + [(replay.end.scale, replay.end.growth_tracker)]
    assert mine == torch_trajectory(policy, overflows)
    assert replay.overflow_steps == tuple(i for i, bad in enumerate(overflows) if bad)
    assert replay.uncertain_steps == 0


def test_nine_backoffs_and_the_long_way_up():
    policy = ScalerPolicy(init=2.0**15)
    down = simulate(policy, forced([True] * 9))
    assert down.end == ScalerState(2.0**6, 0)
    up = simulate(policy, forced([False] * (9 * 2000)), start=down.end)
    assert up.end == ScalerState(2.0**15, 0)
    assert simulate(policy, forced([False] * (9 * 2000 - 1)), start=down.end).end == ScalerState(2.0**14, 1999)


def test_an_overflow_resets_the_streak():
    almost = ScalerPolicy().after(ScalerState(1024.0, 1998), overflow=False)
    assert almost == ScalerState(1024.0, 1999)
    assert ScalerPolicy().after(almost, overflow=True) == ScalerState(512.0, 0)
    assert ScalerPolicy().after(almost, overflow=False) == ScalerState(2048.0, 0)


def test_torch_grows_to_2_127_and_halves_to_zero():
    policy = ScalerPolicy(interval=1)
    assert simulate(policy, forced([False] * 300)).end.scale == 2.0**127
    assert torch_trajectory(policy, [False] * 130)[-1][0] == 2.0**127
    assert simulate(policy, forced([True] * 200)).end.scale == 0.0
    assert torch_trajectory(policy, [True] * 170)[-1][0] == 0.0


def test_limits_torch_does_not_have():
    bounded = ScalerPolicy(init=8.0, interval=1, min_scale=1.0, max_scale=32.0)
    assert simulate(bounded, forced([True] * 20)).end.scale == 1.0
    assert simulate(bounded, forced([False] * 20)).end.scale == 32.0
    static = simulate(ScalerPolicy.static(128.0), forced([True, False] * 20))
    assert {s.scale for s in static.steps} == {128.0} and len(static.overflow_steps) == 20


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"init": 0.0}, "not 0.0"), ({"init": math.inf}, "not inf"), ({"init": math.nan}, "not nan"),
     ({"growth": 0.5}, "not 0.5"), ({"backoff": 0.0}, "not at 0.0"), ({"backoff": 2.0}, "not at 2.0"),
     ({"interval": 0}, "not 0"), ({"min_scale": 1e9}, "smallest 1e.09"), ({"max_scale": 1.0}, "largest 1"),
     ({"min_scale": -1.0}, "smallest -1")],
)  # fmt: skip
def test_policies_that_make_no_scaler(wrong, says):
    with pytest.raises(ValueError, match=says):
        ScalerPolicy(**wrong)


# --- what one step says ----------------------------------------------------------------------------------------------


@given(exponent=st.floats(-120, 60), step=st.integers(-2, 2), fmt=st.sampled_from([FP16, E5M2, BF16]))
@settings(deadline=None)
def test_the_limit_of_an_amax_is_where_a_real_cast_overflows(exponent, step, fmt):
    amax = 2.0**exponent
    limit = OverflowLimit.of_amax(amax, fmt)
    scale = limit.overflows_from
    assert limit.clean_up_to == math.nextafter(scale, 0.0) and limit.estimate == scale
    at, below = amax * scale, amax * limit.clean_up_to
    assert at >= fmt.overflow_limit > below  # all three formats overflow at the tie
    assert limit.overflows(scale) is True and limit.overflows(limit.clean_up_to) is False


@pytest.mark.parametrize("amax", [1e-7, 0.3, 1.0, 65504.0, 65519.99, 65520.0, 1e6])
def test_the_limit_agrees_with_torch_s_fp16(amax):
    limit = OverflowLimit.of_amax(amax)
    for power in range(-10, 40):
        product = torch.tensor(amax * 2.0**power, dtype=torch.float64).to(torch.float16)
        assert limit.overflows(2.0**power) is bool(product.isinf())


def test_what_an_observation_adds():
    bound = OverflowLimit(0.0, 65520.0, 65520.0)  # something unseen may be larger than 1
    assert bound.overflows(2.0**16) is True and bound.overflows(1.0) is None
    clean = bound.observed(1024.0, overflow=False)
    assert (clean.overflows(1024.0), clean.overflows(1025.0), clean.overflows(2.0**16)) == (False, None, True)
    over = OverflowLimit.unknown().observed(2.0**16, overflow=True)
    assert (over.overflows(2.0**16), over.overflows(2.0**15)) == (True, None)
    assert over.estimate > 2.0**15  # the next step down is taken to be clean
    smaller = OverflowLimit(0.0, 65.52, 65.52).observed(2.0**16, overflow=True)
    assert smaller.estimate == pytest.approx(65.52)  # a tensor in view explains the overflow
    contradicted = OverflowLimit.of_amax(1.0).observed(2.0**20, overflow=False)
    assert contradicted.overflows(2.0**20) is False


def test_a_scale_of_zero_shows_nothing():
    known = OverflowLimit.of_amax(1.0)
    assert known.observed(0.0, overflow=False) is known
    assert known.observed(0.0, overflow=True) == OverflowLimit.always()


@given(scale=st.floats(2.0**-20, 2.0**40), amax=st.floats(1e-12, 1e12), overflow=st.booleans())
@settings(deadline=None)
def test_at_the_scale_of_the_run_nothing_is_open(scale, amax, overflow):
    exact = OverflowLimit.of_amax(amax)
    for limit in (OverflowLimit.unknown(), replace(exact, clean_up_to=0.0), exact):
        seen = limit.observed(scale, overflow=overflow)
        assert seen.overflows(scale) is overflow
        assert (seen.estimate <= scale) is overflow


def test_the_ideal_scale_is_the_largest_power_of_two_that_is_clean():
    assert OverflowLimit.of_amax(1.0).ideal.estimate == 2.0**15  # 65536 overflows FP16, 32768 does not
    ideal = OverflowLimit.of_amax(1.0).ideal
    assert ideal.low == ideal.high
    assert OverflowLimit.of_amax(65519.0).ideal.estimate == 1.0
    assert OverflowLimit.of_amax(0.0).ideal.low == math.inf
    between = OverflowLimit(8189.0, 131040.0, 32760.0).ideal
    assert (between.low, between.estimate, between.high) == (2.0**12, 2.0**14, 2.0**16)


# --- flushed ---------------------------------------------------------------------------------------------------------


def fp16_step(step, x, scale, *, rounded=True):
    """A step as a log holds it: gradients times scale in FP16."""
    held = (x * scale).astype(np.float16).astype(np.float64) if rounded else x * scale
    amax = np.abs(held).max() / scale
    histogram = histogram_of(held)
    limit = replace(OverflowLimit.of_amax(amax), clean_up_to=0.0)
    return StepGradients(step, limit, histogram, int((held == 0).sum()), scale, rounded=rounded)


@given(seed=st.integers(0, 2**32 - 1), at=st.integers(-4, 14), to=st.integers(-4, 14))
@settings(max_examples=60, deadline=None)
def test_flushed_at_another_scale_contains_a_real_cast(seed, at, to):
    x = np.random.default_rng(seed).standard_normal(4096) * 1e-6
    x[:500] = 0.0  # structural
    really = ((x * 2.0**to).astype(np.float16) == 0).sum() - 500
    share = fp16_step(0, x, 2.0**at).flushed(2.0**to)
    seen = ((x * 2.0**at).astype(np.float16) != 0).sum()
    assert share.low * 4096 <= really + 1e-6  # of whatever is not a structural zero, at most all elements
    assert really / (4096 - 500) <= share.high or seen == 0
    wide = fp16_step(0, x, 1.0, rounded=False).flushed(2.0**to)
    assert wide.low == wide.high == pytest.approx(really / (4096 - 500), abs=1e-12)


def test_the_estimate_sees_elements_come_back():
    x = np.random.default_rng(0).standard_normal(1 << 16) * 2.0**-24
    step = fp16_step(0, x, 1.0)
    for scale, share in ((1.0, 0.383), (16.0, 0.0249)):  # P(|x| <= 1/2), P(|x| <= 1/32)
        assert step.flushed(scale).estimate == pytest.approx(share, rel=0.15)


# --- search ----------------------------------------------------------------------------------------------------------


def drifting(steps: int = 400) -> list[StepGradients]:
    """Gradients that shrink 64-fold, with one bad batch; FP16 flushes what is small."""
    rng = np.random.default_rng(1)
    run = []
    for s in range(steps):
        x = rng.standard_normal(512) * 2.0 ** (-17 - 6 * s / steps) * (50.0 if s == 200 else 1.0)
        run.append(StepGradients(s, OverflowLimit.of_amax(np.abs(x).max()), histogram_of(x)))
    return run


def test_search_agrees_with_simulating_each_policy():
    run = drifting()
    scores = search(run)
    assert len(scores) == 25 * 4  # intervals of 50, 100, 200 and 2000 steps
    assert [s.lost for s in scores[1:]] == sorted(s.lost for s in scores[1:])
    for score in scores:
        replay = simulate(score.policy, run)
        assert score.skipped == len(replay.overflow_steps)
        assert score.flushed == pytest.approx(replay.flushed.estimate, rel=1e-9)
        assert score.lost == pytest.approx(replay.lost, rel=1e-9)
        assert (score.lowest, score.highest) == (
            min(s.scale for s in replay.steps), max(s.scale for s in replay.steps),
        )  # fmt: skip


def test_search_finds_the_scale_that_loses_least():
    scores = search(drifting())
    best = scores[0]
    assert best.lost <= min(s.lost for s in scores) + 1e-4
    assert best.skipped <= 1 and 2.0**16 <= best.policy.init <= 2.0**24


def test_of_equals_search_takes_the_middle_and_the_stock_interval():
    steady = [StepGradients(s, OverflowLimit.of_amax(1.0), histogram_of([1.0])) for s in range(30)]
    best = search(steady)[0]  # overflows from 65520, flushes below 2**-25
    assert (best.policy.init, best.policy.interval, best.skipped, best.lost) == (2.0**8, 2000, 0, 0.0)
    assert search([]) and search([])[0].lost == 0.0
