"""The histogram: its laws, and what shifting and cutting keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.numerics.formats import FORMATS, FP16
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, Histograms, bin_of, bins_of
from tests.support.references import histogram_of

COUNTS = st.lists(st.integers(0, 2**40), max_size=12)
HISTOGRAMS = st.builds(ExponentHistogram.of, st.integers(-100, 100), COUNTS)
VALUES = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60)
EMPTY = ExponentHistogram.of(None, None)


@given(HISTOGRAMS, HISTOGRAMS, HISTOGRAMS)
def test_merging_is_associative_commutative_and_has_an_identity(a, b, c):
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(EMPTY) == EMPTY.merge(a) == a
    assert a.merge(b).total == a.total + b.total and hash(a.merge(b)) == hash(b.merge(a))


@given(VALUES, st.lists(st.integers(0, 4), min_size=60, max_size=60))
def test_any_partition_merges_to_the_whole(values, groups):
    whole = histogram_of(values)
    merged = EMPTY
    for group in range(5):
        part = [v for v, g in zip(values, groups, strict=False) if g == group]
        merged = merged.merge(histogram_of(part))
    assert merged == whole and merged.counts.dtype == np.int64
    assert whole.total == sum(v != 0 for v in values)


@given(VALUES)
def test_bins_are_those_of_the_definition(values):
    magnitudes = [abs(v) for v in values if v]
    assert bins_of(np.array(magnitudes)).tolist() == [bin_of(m) for m in magnitudes]
    for m in magnitudes:
        assert 2.0 ** bin_of(m) < m <= 2.0 ** (bin_of(m) + 1)


@given(VALUES, st.integers(-8, 9))
def test_shifting_is_scaling_by_a_power_of_two(values, by):
    scaled = histogram_of(np.array(values) * 2.0**by)
    assert histogram_of(values).shift(2.0**by) == scaled


@given(HISTOGRAMS, HISTOGRAMS, st.integers(-60, 60))
def test_shifting_and_merging_go_together(a, b, by):
    try:
        expected = a.shift(2.0**by).merge(b.shift(2.0**by))
    except ValueError:
        return
    assert a.merge(b).shift(2.0**by) == expected


def test_shifting_knows_what_it_does_not_know():
    low = ExponentHistogram.of(EXP_MIN, [1, 1])
    assert low.shift(0.5) == ExponentHistogram.of(EXP_MIN, [2])
    with pytest.raises(ValueError, match="beyond its end bin"):
        low.shift(2.0)
    with pytest.raises(ValueError, match="beyond its end bin"):
        ExponentHistogram.of(EXP_MAX, [1]).shift(0.5)
    for scale in (3.0, 0.0, -2.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite power of two"):
            low.shift(scale)


@given(HISTOGRAMS, st.integers(-120, 120))
def test_slices_partition(h, cut):
    assert h[:cut].merge(h[cut:]) == h[:] == h
    assert h[cut:cut].total == 0


def test_slices_are_by_bin():
    h = ExponentHistogram.of(-2, [1, 2, 3, 4])
    assert h[-1:1] == ExponentHistogram.of(-1, [2, 3])
    for wrong in (0, slice(0, 4, 2)):
        with pytest.raises(TypeError, match="the ends are bins"):
            h[wrong]


@given(VALUES.filter(any), st.integers(-30, 30))
def test_flushed_is_exact_at_powers_of_two(values, by):
    x = np.abs(np.array(values, dtype=np.float64))
    flushed = histogram_of(x).flushed(FP16, 2.0**by)
    assert flushed.low == flushed.high == np.count_nonzero((x * 2.0**by <= FP16.flush_limit) & (x > 0))


def test_bad_questions():
    h = ExponentHistogram.of(0, [1])
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite positive"):
            h.flushed(FORMATS["E4M3FN"], scale)
    with pytest.raises(ValueError, match="cannot be NaN"):
        h.at_most(math.nan)
    assert EMPTY.flushed(FP16).low == 0.0 and EMPTY.total == 0 and EMPTY.shift(2.0) == EMPTY
    assert h.at_most(math.inf).low == 1.0 and h.at_most(0.0).high == 0.0


LIMITS = st.floats(0.0, 1e40) | st.integers(-60, 60).map(lambda k: 2.0**k) | st.sampled_from([math.inf, -1.0])


@given(st.lists(st.tuples(HISTOGRAMS, LIMITS, st.integers(0, 3)), max_size=8), st.integers(-110, 120))
def test_many_histograms_say_what_each_of_them_says(drawn, first):
    histograms = [h for h, _, _ in drawn]
    many = Histograms.of(histograms)
    assert [many.row(i) for i in range(len(drawn))] == histograms
    assert many.total.tolist() == [h.total for h in histograms]
    assert many.below(first).tolist() == [h[:first].total for h in histograms]
    assert many.preceding.tolist() == [h[:k].total for h in histograms for k in range(h.lo, h.lo + h.counts.size)]
    assert many.window(first, 9).tolist() == [[h[k : k + 1].total for k in range(first, first + 9)] for h in histograms]
    sums = [float(sum(c * (h.lo + i) for i, c in enumerate(h.counts.tolist()))) for h in histograms]
    assert many.sums(many.bins.astype(float)).tolist() == pytest.approx(sums)
    ends = [h.at_most(limit) for h, limit, _ in drawn]
    low, high = many.at_most(np.array([limit for _, limit, _ in drawn]))
    assert (low.tolist(), high.tolist()) == ([e.low for e in ends], [e.high for e in ends])


@given(st.lists(st.tuples(HISTOGRAMS, st.integers(0, 3)), max_size=8))
def test_many_histograms_are_merged_by_group(drawn):
    group = np.array([g for _, g in drawn], dtype=np.int64)
    summed = Histograms.of([h for h, _ in drawn]).merged(group, 4)
    for g in range(4):
        whole = EMPTY
        for h, own in drawn:
            whole = whole.merge(h) if own == g else whole
        assert (summed.row(g).lo, summed.row(g).counts.tolist()) == (whole.lo, whole.counts.tolist())
