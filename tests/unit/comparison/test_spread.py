"""How far healthy repeats lie apart, and the limits that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from precdoctor.comparison.spread import limit_factor, moderated, robust_spread, student_quantile

values = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("freedom", [4, 5, 6, 8, 13, 30, 200])
@pytest.mark.parametrize("tail", [1e-2, 1e-4, 1e-6, 1e-8])
def test_the_quantile_of_students_t_is_never_too_small(freedom, tail):
    exact = stats.t.isf(tail, freedom)
    assert exact * 0.9999 <= student_quantile(tail, freedom) <= exact * 1.3
    if freedom >= 13:
        assert student_quantile(tail, freedom) == pytest.approx(exact, rel=0.01)


@given(st.lists(values, min_size=2, max_size=12), values)
def test_a_spread_does_not_know_where_it_is(found, shift):
    assert robust_spread([v + shift for v in found]) == pytest.approx(robust_spread(found), rel=1e-6, abs=1e-6)


def test_an_outlier_counts_among_few_and_not_among_many():
    few, many = [1.0, 1.1, 0.9, 9.0], [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 9.0]
    assert robust_spread(few) > 3.0
    assert robust_spread(many) < 0.1
    assert robust_spread([3.0]) == robust_spread([]) == robust_spread([2.0] * 9) == 0.0


@given(st.floats(0, 10), st.floats(0, 10), st.integers(2, 50))
def test_few_repeats_lean_on_what_is_typical(own, typical, repeats):
    together = moderated(own, typical, repeats)
    assert together >= typical
    assert together <= max(own, typical) * (1.0 + 1e-12)
    if own > typical:  # more repeats, more of its own
        assert moderated(own, typical, repeats + 1) >= together * (1.0 - 1e-12)


def test_more_repeats_narrow_the_limits_and_more_comparisons_widen_them():
    factors = [limit_factor(repeats, 500, 0.001) for repeats in (2, 3, 5, 10, 40)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 7.0 < factors[0]
    assert limit_factor(5, 5000, 0.001) > limit_factor(5, 50, 0.001)
