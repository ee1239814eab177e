"""The tail estimator against the truth: draws cast to FP16, with structural zeros mixed in."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics.formats import BF16, E5M2, FP16
from precdoctor.numerics.histogram import ExponentHistogram, Histograms
from precdoctor.numerics.tail import MATCHED_BINS, flushed_tail, flushed_tails, magnitude, magnitudes

N = 100_000
#: Members of the estimator's family, at scales that are not.
KIN = {
    "normal": lambda rng: rng.normal(0.0, 1.0, N),
    "laplace": lambda rng: rng.laplace(0.0, 1.0, N),
    "student2": lambda rng: rng.standard_t(2, N),
    "student3": lambda rng: rng.standard_t(3, N),
    "log-normal1": lambda rng: np.exp(rng.normal(0.0, 1.0, N)),
}
#: Shapes it does not know.
STRANGERS = {
    "student7": lambda rng: rng.standard_t(7, N),
    "log-normal1.7": lambda rng: np.exp(1.7 * rng.normal(0.0, 1.0, N)),
    "log-normal2.6": lambda rng: np.exp(2.6 * rng.normal(0.0, 1.0, N)),
    "three layers": lambda rng: rng.normal(0.0, 1.0, N) * rng.choice([1.0, 4.0, 30.0], N),
}
#: Densities that are infinite at zero.
PEAKED = {
    "product": lambda rng: rng.normal(0.0, 1.0, N) * rng.normal(0.0, 1.0, N),
    "powered": lambda rng: rng.normal(0.0, 1.0, N) ** 2,
}


def histogram_of(values: np.ndarray) -> ExponentHistogram:
    x = np.abs(values.astype(np.float64))
    mantissa, exponent = np.frexp(x[x > 0])
    bins = np.where(mantissa == 0.5, exponent - 2, exponent - 1)
    return (
        ExponentHistogram(int(bins.min()), np.bincount(bins - bins.min())) if bins.size else ExponentHistogram.of(0, [])
    )


def cast(
    draw: Callable[[np.random.Generator], np.ndarray], scale: float, structural: float
) -> tuple[np.ndarray, np.ndarray]:
    """Values with a share of structural zeros, and the same in FP16."""
    rng = np.random.default_rng(7)
    exact = draw(rng) * scale * (rng.random(N) >= structural)
    return exact, exact.astype(np.float16)


@pytest.mark.parametrize("structural", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("scale", [5e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("draw", KIN)
def test_flushed_share_is_near_the_truth_whatever_else_is_zero(draw: str, scale: float, structural: float) -> None:
    exact, stored = cast(KIN[draw], scale, structural)
    truth = int(((exact != 0) & (stored == 0)).sum())
    intended = int((exact != 0).sum())

    tail = flushed_tail(histogram_of(stored), int((stored == 0).sum()), FP16)

    assert tail.total == pytest.approx(truth, rel=0.2, abs=0.005 * intended)
    again = int(((exact != 0) & ((exact * 16.0).astype(np.float16) == 0)).sum())
    assert tail.still_flushed(FP16, 16.0) == pytest.approx(again, rel=0.4, abs=0.01 * intended)
    lost = np.abs(exact[(stored == 0)]).sum()
    mass = flushed_tails(Histograms.of([histogram_of(stored)]), np.array([(stored == 0).sum()]), FP16).mass
    assert mass[0] == pytest.approx(lost, rel=0.35, abs=1e-4 * np.abs(exact).sum())


@pytest.mark.parametrize("structural", [0.0, 0.5])
@pytest.mark.parametrize("scale", [5e-8, 1e-7, 3e-7])
@pytest.mark.parametrize("draw", STRANGERS)
def test_unknown_shapes_are_off_by_less_than_a_factor_of_1_7(draw: str, scale: float, structural: float) -> None:
    exact, stored = cast(STRANGERS[draw], scale, structural)
    truth = int(((exact != 0) & (stored == 0)).sum())
    assert truth / 1.7 < flushed_tail(histogram_of(stored), int((stored == 0).sum()), FP16).total < truth * 1.7


@pytest.mark.parametrize("scale", [5e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("draw", PEAKED)
def test_peaked_densities_are_underestimated_and_still_seen(draw: str, scale: float) -> None:
    exact, stored = cast(PEAKED[draw], scale, 0.5)
    truth = int(((exact != 0) & (stored == 0)).sum())
    assert truth / 5 < flushed_tail(histogram_of(stored), int((stored == 0).sum()), FP16).total < truth


@pytest.mark.parametrize("zeros", [0, 1, 90_000])
def test_zeros_far_from_the_limit_are_structural(zeros: int) -> None:
    stored = np.random.default_rng(0).normal(0.0, 1.0, 10_000).astype(np.float16)
    stored = stored[np.abs(stored) > 1e-4]
    assert flushed_tail(histogram_of(stored), zeros, FP16).total == 0.0


def test_nothing_survives_says_nothing() -> None:
    assert flushed_tail(ExponentHistogram.of(None, None), 5000, FP16).total == 0.0


def test_a_handful_of_survivors_says_nothing() -> None:
    assert flushed_tail(ExponentHistogram(-25, np.array([20])), 5000, FP16).total == 0.0


def test_eight_bit_gradients() -> None:
    exact = np.random.default_rng(3).normal(0.0, 2.0**-16, N)
    stored = exact.astype(ml_dtypes.float8_e5m2).astype(np.float64)
    truth = int((stored == 0).sum())
    assert flushed_tail(histogram_of(stored), truth + 50_000, E5M2).total == pytest.approx(truth, rel=0.1)


def test_bfloat16_has_its_own_limit() -> None:
    stored = np.random.default_rng(0).normal(0.0, 1e-7, N).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert flushed_tail(histogram_of(stored), 1000, BF16).total == 0.0


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=30),
    st.integers(-25, -10),
    st.integers(0, 100_000),
    st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_never_more_than_the_zeros_and_never_more_after_scaling_up(
    counts: list[int], lo: int, zeros: int, binades: int
) -> None:
    tail = flushed_tail(ExponentHistogram(lo, np.array(counts)), zeros, FP16)
    assert 0.0 <= tail.total <= zeros * (1 + 1e-9)
    assert tail.still_flushed(FP16, 1.0) == pytest.approx(tail.total)
    assert tail.still_flushed(FP16, 2.0**binades) <= tail.still_flushed(FP16, 2.0 ** max(0, binades - 1)) + 1e-9


def test_magnitude_is_the_sum_of_absolute_values_within_a_bin() -> None:
    values = np.random.default_rng(0).normal(0.0, 1.0, N)
    assert magnitude(histogram_of(values)) == pytest.approx(np.abs(values).sum(), rel=0.1)
    assert MATCHED_BINS == 10  # the page of PD201 says so


@given(st.lists(st.tuples(st.integers(-30, -10), st.lists(st.integers(0, 3000), max_size=14), st.integers(0, 9000))))
def test_the_tails_of_many_tensors_are_those_of_each(drawn):
    histograms = [ExponentHistogram.of(lo, counts) for lo, counts, _ in drawn]
    zeros = np.array([zero for _, _, zero in drawn], dtype=np.int64)
    found = flushed_tails(Histograms.of(histograms), zeros, FP16)
    alone = [flushed_tail(h, zero, FP16) for h, zero in zip(histograms, zeros.tolist(), strict=True)]
    assert found.total.tolist() == pytest.approx([t.total for t in alone])
    assert magnitudes(Histograms.of(histograms)).tolist() == pytest.approx([magnitude(h) for h in histograms])
