"""Block casts and their predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor import open_run
from precdoctor.errors import UsageError
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    TILE_1X128,
    TILE_128X128,
    BlockHistogram,
    ScaleRule,
)
from precdoctor.numerics.cells import Limits
from precdoctor.numerics.formats import E8M0
from tests.support.references import blocks_of, cast_blocks
from tests.unit.numerics.distributions import CONTINUOUS, NAMES, SAMPLES, tensor

ROWS = [f for f in BLOCK_FORMATS.values() if f.block[0] == 1]


def rules(fmt):
    return (ScaleRule.FLOOR, ScaleRule.UP) if fmt.scale is E8M0 else (ScaleRule.AMAX,)


CASES = [pytest.param(f, r, id=f"{f.name}-{r.value}") for f in ROWS for r in rules(f)]


def measured(x, fmt, rule):
    cast = cast_blocks(x, fmt, rule=rule)
    used = x != 0
    q, limits = np.abs(cast.quotients[used]), Limits.of(fmt.element)
    beyond = q >= limits.saturate if limits.tie_overflows else q > limits.saturate
    unit = np.abs(x).max()
    return {
        "flushed": np.mean(cast.values[used] == 0),
        "saturated": np.mean(beyond),
        "error": np.linalg.norm((x - cast.values) / unit) / np.linalg.norm(x / unit),
    }


def predicted(x, fmt, rule):
    histogram = blocks_of(x, fmt.block[1])
    return predict_blocks(histogram, fmt, amax=float(np.abs(x).max()), rule=rule)


def check(p, truth):
    assert p.flushed.low - 1e-12 <= truth["flushed"] <= p.flushed.high + 1e-12
    assert p.saturated.low - 1e-12 <= truth["saturated"] <= p.saturated.high + 1e-12
    assert p.relative_error.low <= truth["error"] <= p.relative_error.high * (1 + 1e-6)
    for quantity in (p.flushed, p.subnormal, p.saturated, p.relative_error, p.scales_flushed):
        assert 0.0 <= quantity.low <= quantity.estimate <= quantity.high <= 1.0


@pytest.mark.parametrize(("fmt", "rule"), CASES)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_truth_lies_in_the_predicted_interval(fmt, rule, name, seed):
    x, _ = tensor(name, seed)
    x = x[:, : 128 - seed % 50]  # short last blocks, too
    p = predicted(x, fmt, rule)
    check(p, measured(x, fmt, rule))
    assert p.scale is None


@pytest.mark.parametrize(("fmt", "rule"), CASES)
def test_every_distribution_and_the_estimate(fmt, rule):
    off = []
    for name in NAMES:
        x, _ = tensor(name, 5)
        p, truth = predicted(x, fmt, rule), measured(x, fmt, rule)
        check(p, truth)
        if name in CONTINUOUS and name != "one outlier":  # its block has a shape of its own
            off.append(abs(p.sqnr_db.estimate + 20 * math.log10(truth["error"])))
        if rule is ScaleRule.UP and "subnormal" not in name and "denormal" not in name:
            assert p.saturated.high == 0.0
    assert np.mean(np.array(off) <= 1.0) >= 0.75 and max(off) < 3.0, off


def test_tiles_are_never_saturated():
    x, _ = tensor("student", 1)
    assert predicted(x, TILE_1X128, ScaleRule.AMAX).saturated.high == 0.0


def test_scales_of_nvfp4_can_underflow_themselves():
    x = np.full((2, 32), 1.0)
    x[1] = 1e-7  # 448 * 1e-7 is below half of E4M3's smallest number
    p = predicted(x, NVFP4, ScaleRule.AMAX)
    assert p.scales_flushed.low == p.scales_flushed.high == 0.5
    assert p.flushed.low > 0.0 and cast_blocks(x, NVFP4).values[1].max() == 0.0
    check(p, measured(x, NVFP4, ScaleRule.AMAX))


def test_scales_of_mx_are_clamped():
    for size in (1e-39, 2.0**-145, 1e38):
        x = np.random.default_rng(0).normal(size=(8, 64)) * size
        for rule in (ScaleRule.FLOOR, ScaleRule.UP):
            check(predicted(x, MXFP8_E4M3, rule), measured(x, MXFP8_E4M3, rule))
    x = np.random.default_rng(0).normal(size=(8, 64)) * 1e-40  # 2^-133: flushed at the smallest scale, 2^-127
    assert measured(x, MXFP4, ScaleRule.FLOOR)["error"] == predicted(x, MXFP4, ScaleRule.FLOOR).relative_error.estimate


def test_floor_clips_a_few_of_a_gaussian_and_up_none():
    x = np.random.default_rng(0).normal(size=(256, 1024))
    assert 0.001 < measured(x, MXFP8_E4M3, ScaleRule.FLOOR)["saturated"] < 0.01
    assert measured(x, MXFP8_E4M3, ScaleRule.UP)["saturated"] == 0.0


def test_block_casts_by_hand():
    x = np.zeros((1, 32))
    x[0, :4] = 7.0, 1.0, 0.2, -3.0
    floor = cast_blocks(x, MXFP4)  # X = 2^(2 - 2)
    assert floor.values[0, :4].tolist() == [6.0, 1.0, 0.0, -3.0] and floor.scales[0, 0] == 1.0
    up = cast_blocks(x, MXFP4, rule=ScaleRule.UP)  # 7 > 6, so X = 2
    assert up.values[0, :4].tolist() == [8.0, 1.0, 0.0, -3.0] and up.scales[0, 0] == 2.0
    tile = cast_blocks(np.full((130, 130), 4480.0), TILE_128X128)
    assert np.unique(tile.scales).tolist() == [10.0] and (tile.values == 4480.0).all()
    assert (cast_blocks(np.zeros((2, 40)), NVFP4).values == 0.0).all()


def test_block_histograms_count_like_the_log():
    x = np.array([[4.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    h = blocks_of(x, 16)
    assert h.below == (1, 1, 1) and h.amax.total == 1 and h.amax.lo == 1


def test_block_histograms_of_recorded_rows():
    rows = open_run(SAMPLES / "gpt-bf16-healthy" / "run").tensors()
    rows = rows[rows["block32_hist"].notna()].head(20).to_dict("records")
    assert rows
    for row in rows:
        h = BlockHistogram.of_row(row, 32)
        assert sum(h.below) == row["numel"] - row["zero"] and h.below[0] >= h.amax.total
        p = predict_blocks(h, MXFP8_E4M3)
        assert p.elements == sum(h.below) and p.sqnr_db.low > 15.0
        assert BlockHistogram.of_row({"block16_hist": None}, 16) is None


def test_bad_input():
    empty = blocks_of(np.zeros((2, 32)), 32)
    p = predict_blocks(empty, MXFP8_E4M3)
    assert p.elements == 0 and p.flushed.high == p.relative_error.high == 0.0 and p.sqnr_db.low == math.inf
    with pytest.raises(UsageError, match="not recorded"):
        predict_blocks(empty, TILE_128X128)
    with pytest.raises(UsageError, match="blocks of 1x16"):
        predict_blocks(empty, NVFP4)
    with pytest.raises(ValueError, match="needs the tensor's amax"):
        predict_blocks(blocks_of(np.ones((1, 16)), 16), NVFP4)
    for bad in (np.zeros(3), np.array([[math.nan]])):
        with pytest.raises(ValueError, match="matrix of finite numbers"):
            cast_blocks(bad, MXFP4)


def test_memory_per_element():
    assert MXFP8_E4M3.bits_per_element / 8 - 1 == pytest.approx(0.031, abs=0.001)
    assert NVFP4.bits_per_element / 4 - 1 == pytest.approx(0.125)
    assert TILE_1X128.bits_per_element == 8.25
