"""Predictions by group against real casts of random tensors."""

from __future__ import annotations

import numpy as np
import pytest

from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E2M1, E4M3FN, E5M2, INT4, INT8
from precdoctor.numerics.group_prediction import predict_groups, tally_groups
from precdoctor.numerics.histogram import ExponentHistogram, Histograms
from tests.support.references import groups_of

FORMATS = (INT8, INT4, E4M3FN, E5M2, E2M1)


def drawn(rng):
    """Matrices: smooth, heavy-tailed, with outlier rows and columns, sparse, tiny, huge, of few values."""
    shape = (int(rng.integers(1, 60)), int(rng.integers(1, 200)))
    x = rng.standard_normal(shape)
    yield x
    yield rng.standard_t(2.2, shape) * np.exp(2 * rng.standard_normal((shape[0], 1)))
    yield x * np.where(rng.random(shape[1]) < 0.05, 40.0, 1.0)
    yield np.maximum(x, 0.0) * 1e-30
    yield np.where(rng.random(shape) < 0.9, 0.0, x * 1e30)
    yield np.round(x * 2.0) / 2.0
    yield np.exp2(rng.integers(-20, 20, shape).astype(float))


def measured(groups, fmt):
    """SQNR and flushed share of a real cast with a scale per row."""
    amax = np.abs(groups).max(axis=1, keepdims=True)
    scales = np.where(amax > 0.0, fmt.max / np.where(amax > 0.0, amax, 1.0), 1.0)
    result = cast_array(groups * scales, fmt, saturate=True) / scales
    noise, used = float(np.square(groups - result).sum()), groups != 0.0
    sqnr = np.inf if noise == 0.0 else 10.0 * np.log10(float(np.square(groups).sum()) / noise)
    return sqnr, float((used & (result == 0.0)).sum()) / max(int(used.sum()), 1)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_truth_lies_inside_and_near_the_estimate(fmt):
    off = []
    for seed in range(30):
        for groups in drawn(np.random.default_rng(seed)):
            if not groups.any():
                continue
            predicted = predict_groups(groups_of(groups), fmt)
            sqnr, flushed = measured(groups, fmt)
            assert predicted.flushed.low - 1e-9 <= flushed <= predicted.flushed.high + 1e-9
            if sqnr < 120.0:
                assert predicted.sqnr_db.low - 1e-4 <= sqnr <= predicted.sqnr_db.high + 1e-4
                off.append(abs(predicted.sqnr_db.estimate - sqnr))
    assert len(off) > 100
    assert np.median(off) <= 0.5


def test_one_outlier_channel_costs_a_scale_for_the_tensor_and_not_one_per_channel():
    x = np.random.default_rng(0).standard_normal((256, 64))
    x[:, 7] *= 100.0
    whole, token, channel = (predict_groups(groups_of(groups), INT8) for groups in (x.reshape(1, -1), x, x.T))
    # All are held against the energy of the tensor, most of it the outlier's: what tells is what became zero.
    assert whole.flushed.estimate > token.flushed.estimate > 0.2 > 20 * channel.flushed.estimate
    assert [p.flushed.estimate for p in (whole, token, channel)] == pytest.approx(
        [measured(groups, INT8)[1] for groups in (x.reshape(1, -1), x, x.T)], rel=0.05
    )


def test_a_tensor_of_zeros_loses_nothing():
    nothing = predict_groups(groups_of(np.zeros((3, 4))), INT4)
    assert nothing.elements == 0
    assert nothing.sqnr_db.estimate == np.inf and nothing.flushed.high == 0.0
    assert groups_of([[np.nan, np.inf, 0.0]]).elements == 0


def test_many_rows_are_tallied_as_one_by_one():
    rng = np.random.default_rng(1)
    tensors = [groups_of(groups) for groups in drawn(rng)]
    ratios = Histograms.of([ExponentHistogram(0, np.array(t.counts)) for t in tensors])
    energy = np.concatenate([t.energy for t in tensors])
    elements, sums = np.array([t.elements for t in tensors]), np.array([t.sum_sq for t in tensors])
    for fmt in FORMATS:
        found, errors, bins = tally_groups(ratios, energy, elements, sums, fmt)
        assert bins.counts.sum() == pytest.approx(elements.sum())
        for i, tensor in enumerate(tensors):
            alone = predict_groups(tensor, fmt)
            assert found.elements[i] == tensor.elements
            assert found.flushed[0][i] <= alone.flushed.high * tensor.elements + 1e-6
            assert found.flushed[1][i] >= alone.flushed.low * tensor.elements - 1e-6
            decibels = -10.0 * np.log10(max(errors[i], 1e-30))
            if alone.sqnr_db.estimate < 100.0:
                assert decibels == pytest.approx(alone.sqnr_db.estimate, abs=3.0)
