"""Worked numbers that tutorials get right and wrong, recomputed."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from precdoctor.numerics.bitview import bit_view
from precdoctor.numerics.blocks import TILE_1X128
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import BF16, E2M1, E4M3FN, E5M2, FORMATS, FP16, TF32
from precdoctor.numerics.prediction import predict
from tests.support.references import amax_scale, cast_blocks, statistics_of
from tests.unit.numerics.exact_casts import cast


def relative(a, b):
    return np.abs(np.asarray(a) - b) / np.abs(b)


def test_1e_5_in_fp16_is_a_subnormal_not_zero():
    assert cast(1e-5, FP16) == 168 * 2.0**-24 == pytest.approx(1.00136e-5, rel=1e-5)
    assert relative(cast(1e-5, FP16), 1e-5) == pytest.approx(0.00136, rel=1e-2)
    assert cast(1e-6, FP16) == pytest.approx(1.0133e-6, rel=1e-4)
    assert cast(2.0**-25, FP16) == 0.0 < cast(math.nextafter(2.0**-25, 1.0), FP16)


def test_e4m3_at_scale_448_over_12_5():
    scale = amax_scale(12.5, E4M3FN)
    assert scale == pytest.approx(35.84)
    stored = cast_array(np.array([1.7, 12.0, 0.001]) * scale, E4M3FN)
    assert stored.tolist() == [60.0, 416.0, 0.03515625]  # 432 is not a code point: the step there is 32
    assert (stored / scale).tolist() == pytest.approx([1.67411, 11.607, 9.809e-4], rel=1e-4)
    assert relative(stored / scale, [1.7, 12.0, 0.001]).tolist() == pytest.approx([0.015, 0.033, 0.019], abs=6e-4)
    assert cast(432.0, E4M3FN) != 432.0 and E4M3FN.min_normal < 0.03584


def test_an_outlier_does_not_delete_the_others():
    x = np.array([0.40, -0.10, 220, 0.05, -0.30])
    scale = amax_scale(220, E4M3FN)
    assert relative(cast_array(x * scale, E4M3FN) / scale, x).max() == pytest.approx(0.023, abs=1e-3)
    x[2] = 4400
    scale = amax_scale(4400, E4M3FN)
    stored = cast_array(x * scale, E4M3FN)
    assert stored[3] == 3 * 2.0**-9 and stored[3] / scale == pytest.approx(0.0575474, rel=1e-5)
    error = relative(stored / scale, x)
    assert error[3] == pytest.approx(0.15, abs=2e-3) and error[1] == pytest.approx(0.041, abs=1e-3)
    statistics = statistics_of(x)
    assert predict(statistics, E4M3FN, scale=scale).flushed.high == 0.0


def test_per_tensor_scaling_shrugs_off_an_outlier():
    x = np.random.default_rng(0).normal(0, 0.3, (64, 1024))
    x[5, 77] = 200.0
    x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    others = np.ones(x.shape, dtype=bool)
    others[5, 77] = False
    scale = amax_scale(200.0, E4M3FN)

    def error(stored):
        return np.linalg.norm((stored - x)[others]) / np.linalg.norm(x[others])

    tensor, tiles = error(cast_array(x * scale, E4M3FN) / scale), error(cast_blocks(x, TILE_1X128).values)
    assert tensor == pytest.approx(0.0263, abs=3e-4) and tiles == pytest.approx(0.0257, abs=3e-4)
    assert tensor / tiles == pytest.approx(1.02, abs=0.02)  # not 30 to 50 times


def test_amax_history():
    history = [2.1, 2.4, 8.5, 2.3, 2.2]
    assert amax_scale(history[-1], E4M3FN) == pytest.approx(203.64, abs=0.01)
    assert amax_scale(max(history), E4M3FN) == pytest.approx(52.71, abs=0.01)


def test_ends_of_the_formats():
    assert math.log(FP16.max) == pytest.approx(11.0899, abs=1e-4)
    assert cast(464.0, E4M3FN) == 448.0 and math.isnan(cast(math.nextafter(464.0, 500.0), E4M3FN))
    assert math.isinf(cast(61440.0, E5M2))
    assert (E4M3FN.overflow_limit, E4M3FN.tie_overflows) == (464.0, False)
    assert (E5M2.overflow_limit, E5M2.tie_overflows) == (61440.0, True)
    assert cast(float(np.finfo(np.float32).min), BF16) == -math.inf  # fully masked rows
    assert cast(100000.0, BF16) == 99840.0
    assert cast(math.pi, BF16) == 3.140625 == cast(math.pi, FP16)
    assert [cast(c / 2, E2M1) for c in (0, 1, 2, 3, 4, 6, 8, 12)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_ranges():
    assert E4M3FN.binades == pytest.approx(17.8, abs=0.05)
    for name, decades in (("FP16", 9.0), ("E5M2", 9.0), ("BF16", 76.5), ("E2M1", 0.8)):
        assert FORMATS[name].decades == pytest.approx(decades, abs=0.05)
    assert TF32.bits == 19 and not TF32.stored
    assert E4M3FN.headroom(448.0) == 0.0 and E4M3FN.headroom(1.0) == pytest.approx(8.807, abs=1e-3)


def test_updates_that_are_lost_in_bf16():
    half = bit_view(0.5, BF16)
    down, up = half.down, half.up
    assert up.size * 2 == 2.0**-8 and cast(0.5 + 1e-4, BF16) == 0.5  # an Adam step of 1e-4 is lost
    assert down.size * 2 == 2.0**-9  # below a power of two the ulp halves
    for fmt, stall in ((BF16, 256), (FP16, 2048)):  # a running sum of ones
        assert cast(stall + 1.0, fmt) == stall and cast(stall - 1.0 + 1.0, fmt) == stall
