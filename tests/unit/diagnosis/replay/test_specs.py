"""How loss scalers, recipes and accumulators are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.offline.replay.specs import (
    parse_accumulator,
    parse_operand_format,
    parse_policy,
    parse_recipe,
    spell_policy,
)
from precdoctor.errors import UsageError
from precdoctor.numerics.accumulation import Accumulator
from precdoctor.numerics.blocks import MXFP8_E4M3, TILE_1X128
from precdoctor.numerics.formats import E4M3FN, E5M2
from precdoctor.numerics.fp8_scaling import Amax, CurrentScaling, DelayedScaling
from precdoctor.numerics.loss_scaling import ScalerPolicy


def test_loss_scalers():
    assert parse_policy("init=65536,growth=2,interval=2000,backoff=0.5") == ScalerPolicy()
    assert parse_policy("init=2^13") == ScalerPolicy(init=8192.0)
    assert parse_policy("init_scale=1024, growth_interval=100,min=1,max=2^20") == ScalerPolicy(
        init=1024.0, interval=100, min_scale=1.0, max_scale=2.0**20
    )
    assert parse_policy("static=1024") == ScalerPolicy.static(1024.0)
    assert parse_policy("best") == "best" and parse_policy(" Used ") == "used"


@given(
    init=st.sampled_from([1.0, 3.3, 65536.0, 2.0**40, 2.0**-20, 1000.1]),
    growth=st.sampled_from([2.0, 1.5]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 10**6),
    floor=st.sampled_from([0.0, 2.0**-30]),
)
def test_spelling_and_parsing_are_inverse(init, growth, backoff, interval, floor):
    policy = ScalerPolicy(init=init, growth=growth, backoff=backoff, interval=interval, min_scale=floor)
    assert parse_policy(spell_policy(policy)) == policy
    assert parse_policy(spell_policy(ScalerPolicy.static(init))) == ScalerPolicy.static(init)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("int=3", "did you mean 'init'"), ("init", "'init' is not KEY=VALUE"), ("", "says nothing"),
     ("init=x", "not a number"),
     ("growth=0.5", "at least 1, not 0.5"), ("interval=2.5", "whole number of steps, not 2.5"),
     ("interval=inf", "not inf"), ("interval=0", "at least 1 step, not 0"), ("init=nan", "not nan"),
     ("static=3,interval=1", "no other key"), ("init=1,min=2", "does not lie between"), ("init=2^9999", "not a number"),
     ("bset", "is not KEY=VALUE")],
)  # fmt: skip
def test_wrong_loss_scalers(spec, says):
    with pytest.raises(UsageError, match=says.replace("^", r"\^")):
        parse_policy(spec)


def test_recipes():
    assert parse_recipe("current") == CurrentScaling() and parse_recipe("current:2") == CurrentScaling(2)
    assert parse_recipe("delayed") == DelayedScaling(1024, Amax.MAX, 0)
    assert parse_recipe("Delayed:16:recent:1") == DelayedScaling(16, Amax.MOST_RECENT, 1)
    assert parse_recipe("mx") is parse_recipe("mxfp8") is MXFP8_E4M3
    assert parse_recipe("tile128") is TILE_1X128 and parse_recipe("best") == "best"
    for recipe in (CurrentScaling(), CurrentScaling(1), DelayedScaling(16, Amax.MOST_RECENT, 2), DelayedScaling()):
        assert parse_recipe(str(recipe)) == recipe


@pytest.mark.parametrize(
    ("spec", "says"),
    [("delaid", "did you mean 'delayed'"), ("delayed:x", "'x' is not a whole number"), ("delayed:0", "at least 1 step"),
     ("delayed:16:min", "neither max nor recent"), ("delayed:1:max:1:1", "not a scaling recipe"),
     ("e4m3", "not a scaling"),
     ("mxfp8:3", "not a scaling"), ("", "not a scaling"), ("current:1.5", "not a whole number")],
)  # fmt: skip
def test_wrong_recipes(spec, says):
    with pytest.raises(UsageError, match=says):
        parse_recipe(spec)


def test_operand_formats():
    assert parse_operand_format("hybrid")("grad_output") is E5M2 and parse_operand_format("hybrid")("weight") is E4M3FN
    assert parse_operand_format("e5m2")("weight") is E5M2
    for wrong in ("int8", "mxfp8", "e8m0", "e4m4"):
        with pytest.raises(UsageError):
            parse_operand_format(wrong)


def test_accumulators():
    assert parse_accumulator("14:") == parse_accumulator("14") == Accumulator() and parse_accumulator(
        "14:128"
    ) == Accumulator(promote=128)
    for wrong, says in (("x", "'x'"), ("14:100", "multiple of 32"), ("99", "not 99"), ("14:1:1", "1:1")):
        with pytest.raises(UsageError, match=says):
            parse_accumulator(wrong)
