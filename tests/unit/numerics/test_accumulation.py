"""Narrow accumulators: against exact sums, against figures known beforehand, and laws."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics.accumulation import (
    FP32_ACCUMULATOR,
    LONGEST,
    Accumulator,
    Operands,
    Rounding,
    accumulate,
    accumulation_error,
)

HOPPER, PROMOTED = Accumulator(), Accumulator(promote=128)
NEAREST = Accumulator(rounding=Rounding.NEAREST)


def test_what_truncation_does_to_4096_positive_products():
    error = {a: accumulation_error(4096, Operands.SAME_SIGN, a).mean for a in (HOPPER, NEAREST, PROMOTED)}
    assert error[HOPPER] == pytest.approx(0.07, abs=0.005)
    assert error[NEAREST] == pytest.approx(0.0035, abs=0.0003)
    assert error[PROMOTED] == pytest.approx(0.0006, abs=0.0001)
    sequential = accumulation_error(4096, Operands.SAME_SIGN, Accumulator(promote=128, group=1)).mean
    assert sequential == pytest.approx(0.0009, abs=0.0001)


def test_zero_mean_operands_fare_far_better():
    same, zero = (accumulation_error(4096, o, HOPPER) for o in (Operands.SAME_SIGN, Operands.ZERO_MEAN))
    assert zero.relative < same.relative / 20 and zero.to_terms < same.to_terms / 1000
    assert zero.mean is None and zero.relative == pytest.approx(0.0012, abs=0.0002)
    assert same.bias == pytest.approx(-same.mean, rel=0.01)  # always towards zero
    assert abs(zero.bias) < zero.relative


def test_fp32_is_as_good_as_exact_beside_it():
    for operands in Operands:
        wide, narrow = (accumulation_error(4096, operands, a).relative for a in (FP32_ACCUMULATOR, PROMOTED))
        assert wide < 1e-6 < narrow


def by_hand(row: list[float], accumulator: Accumulator) -> float:
    """The model in exact arithmetic, one number at a time."""

    def cut(x: Fraction, largest: Fraction) -> Fraction:
        if largest == 0:
            return x
        exponent = 0
        while Fraction(2) ** (exponent + 1) <= largest:
            exponent += 1
        while Fraction(2) ** exponent > largest:
            exponent -= 1
        steps = x / Fraction(2) ** (exponent - accumulator.bits + 1)
        whole = int(steps) if accumulator.rounding is Rounding.TOWARD_ZERO else round(steps)
        return whole * Fraction(2) ** (exponent - accumulator.bits + 1)

    total, running = Fraction(0), Fraction(0)
    for first in range(0, len(row), accumulator.group):
        group = [Fraction(x) for x in row[first : first + accumulator.group]]
        largest = max([*(abs(x) for x in group), abs(running)])
        added = sum((cut(x, largest) for x in group), Fraction(0)) + cut(running, largest)
        running = cut(added, abs(added))
        if accumulator.promote and (first + accumulator.group) % accumulator.promote == 0:
            total, running = Fraction(float(np.float32(float(total + running)))), Fraction(0)
    return float(np.float32(float(total + running)))


@given(
    row=st.lists(st.integers(-225, 225).map(float), min_size=1, max_size=40),
    bits=st.integers(2, 24),
    group=st.sampled_from([1, 4, 8]),
    promote=st.sampled_from([None, 8, 16]),
    rounding=st.sampled_from([Rounding.TOWARD_ZERO, Rounding.NEAREST]),
)
@settings(max_examples=150, deadline=None)
def test_arrays_agree_with_exact_arithmetic(row, bits, group, promote, rounding):
    accumulator = Accumulator(bits=bits, group=group, promote=promote, rounding=rounding)
    assert accumulate(np.array([row, row]), accumulator).tolist() == [by_hand(row, accumulator)] * 2


@given(row=st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=64))
@settings(deadline=None)
def test_integers_that_fit_are_summed_exactly(row):
    assert accumulate(np.array([row]), Accumulator(bits=40, promote=32)).tolist() == [float(sum(row))]


def test_swamping_stalls_a_running_sum():
    ones = np.ones((1, 5000))
    sequential = Accumulator(bits=8, group=1)
    assert accumulate(ones, sequential).tolist() == [256.0]  # a running sum of ones in BF16
    assert accumulate(ones, Accumulator(bits=11, group=1, rounding=Rounding.NEAREST)).tolist() == [2048.0]  # in FP16


def test_error_grows_with_length_and_shrinks_with_bits():
    by_length = [accumulation_error(k, Operands.SAME_SIGN, HOPPER).relative for k in (256, 1024, 4096)]
    assert by_length == sorted(by_length)
    by_bits = [accumulation_error(1024, Operands.SAME_SIGN, Accumulator(bits=b)).relative for b in (10, 14, 20)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert accumulation_error(4 * LONGEST, Operands.SAME_SIGN, PROMOTED).length == 4 * LONGEST


@pytest.mark.parametrize(
    "wrong", [{"bits": 1}, {"bits": 99}, {"group": 0}, {"promote": 100}, {"promote": 0}, {"promote": -32}]
)
def test_accumulators_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match=str(*wrong.values())):
        Accumulator(**wrong)
    with pytest.raises(ValueError, match="0"):
        accumulation_error(0, Operands.SAME_SIGN)
