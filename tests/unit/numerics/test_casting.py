"""Formats and casts against libraries that know nothing of us: ml_dtypes, gfloat, torch."""

from __future__ import annotations

import math

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics.casting_array import cast_array, decode, decode_array, encode_array, nan_code
from precdoctor.numerics.formats import BF16, E4M3FN, E5M2, E8M0, FORMATS, FP16, FP32, FP64, INT8, SCALE_FORMATS, Kind
from tests.unit.numerics.exact_casts import cast, encode

ALL = {**FORMATS, **SCALE_FORMATS}
FLOATS = {name: f for name, f in FORMATS.items() if f.kind is Kind.FLOAT}
SMALL = {name: f for name, f in ALL.items() if f.bits <= 16}
NARROW = {name: f for name, f in FLOATS.items() if f.bits <= 8}
GFLOAT = {
    "FP64": gf.format_info_binary64, "FP32": gf.format_info_binary32, "FP16": gf.format_info_binary16,
    "BF16": gf.format_info_bfloat16, "E4M3FN": gf.format_info_ocp_e4m3, "E5M2": gf.format_info_ocp_e5m2,
    "E3M2": gf.format_info_ocp_e3m2, "E2M3": gf.format_info_ocp_e2m3, "E2M1": gf.format_info_ocp_e2m1,
    "E8M0": gf.format_info_ocp_e8m0, "INT8": gf.format_info_ocp_int8,
}  # fmt: skip


def codes(fmt):
    return np.arange(1 << fmt.bits, dtype=np.uint64)


def oracle_dtype(fmt):
    return np.dtype({"FP16": np.float16}.get(fmt.name) or getattr(ml_dtypes, fmt.dtype))


def params(formats):
    return pytest.mark.parametrize("fmt", list(formats), ids=[f.name for f in formats])


def same(a, b):
    """Equal as numbers, NaN as NaN, zeros by sign."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


def positive_finite(fmt):
    return np.array([decode(code, fmt) for code in range(fmt.max_code + 1)])


def midpoints(fmt):
    """Every finite value, every midpoint of two, the float32s on both sides of it, the same beyond the maximum.

    Not the float64s: ml_dtypes and torch convert those to float32 first and so round twice.
    """
    values = np.append(positive_finite(fmt), 2 * fmt.overflow_limit - fmt.max)
    middle = values[:-1] + np.diff(values) / 2
    single = middle.astype(np.float32)
    assert np.array_equal(single, middle)
    points = np.concatenate(
        [values, middle, np.nextafter(single, np.float32(0)), np.nextafter(single, np.float32(np.inf))]
    )
    return points if fmt.kind is Kind.SCALE else np.concatenate([points, -points])


# --- code points -----------------------------------------------------------------------------------------------------


@params(ALL.values())
def test_the_largest_code_is_the_stated_maximum(fmt):
    assert decode(fmt.max_code, fmt) == fmt.max
    smallest = decode(0 if fmt.kind is Kind.SCALE else 1, fmt)
    assert smallest == fmt.min_subnormal
    if fmt.kind is Kind.FLOAT:
        assert decode(1 << fmt.mantissa_bits, fmt) == fmt.min_normal


@params([f for f in SMALL.values() if f.kind is not Kind.INTEGER])
def test_code_points_agree_with_ml_dtypes(fmt):
    unsigned = np.uint16 if fmt.bits == 16 else np.uint8
    with np.errstate(invalid="ignore"):  # NumPy's word for meeting a NaN
        theirs = np.arange(1 << fmt.bits, dtype=unsigned).view(oracle_dtype(fmt)).astype(np.float64)
    assert same(decode_array(codes(fmt), fmt), theirs)
    assert same([decode(int(c), fmt) for c in codes(fmt)], theirs)


@params([ALL[name] for name in GFLOAT if ALL[name].bits <= 8])
def test_code_points_agree_with_gfloat(fmt):
    unit = 2.0**-6 if fmt is INT8 else 1.0  # the INT8 of MX counts in 2^-6
    theirs = [gfloat.decode_float(GFLOAT[fmt.name], c).fval for c in range(1 << fmt.bits)]
    assert same(decode_array(codes(fmt), fmt) * unit, theirs)


@pytest.mark.parametrize("name", ["FP64", "FP32", "FP16", "BF16"])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_wide_code_points_agree_with_gfloat(name, data):
    fmt = ALL[name]
    code = data.draw(st.integers(0, (1 << fmt.bits) - 1))
    theirs = gfloat.decode_float(GFLOAT[name], code).fval
    assert same(decode(code, fmt), theirs) and same(decode_array([code], fmt)[0], theirs)


@params(SMALL.values())
def test_encode_undoes_decode(fmt):
    values = decode_array(codes(fmt), fmt)
    expected = [nan_code(fmt) if math.isnan(v) else c for c, v in enumerate(values.tolist())]
    assert encode_array(values, fmt).tolist() == expected
    for code in range(0, 1 << fmt.bits, 1 if fmt.bits <= 8 else 97):
        assert encode(values[code], fmt) == expected[code]


# --- rounding to nearest ---------------------------------------------------------------------------------------------


@params([f for f in SMALL.values() if f.kind is Kind.FLOAT])
def test_midpoints_agree_with_ml_dtypes(fmt):
    points = midpoints(fmt)
    with np.errstate(all="ignore"):
        theirs = points.astype(oracle_dtype(fmt)).astype(np.float64)
    assert same(cast_array(points, fmt), theirs)


@params(NARROW.values())
@pytest.mark.parametrize("saturate", [False, True])
def test_midpoints_agree_with_gfloat_where_it_has_the_format(fmt, saturate):
    if fmt.name not in GFLOAT:
        pytest.skip("not in gfloat; ml_dtypes has it")
    info, points = GFLOAT[fmt.name], midpoints(fmt)
    no_choice = not saturate and info.num_nans == 0 and not info.num_posinfs  # there gfloat refuses, we clip
    theirs = [gfloat.round_float(info, p, sat=saturate or no_choice) for p in points.tolist()]
    assert same([cast(p, fmt, saturate=saturate) for p in points.tolist()], theirs)


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
)
def test_midpoints_agree_with_torch(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch has no such dtype")
    fmt = next(f for f in FORMATS.values() if f.dtype == name)
    points = torch.from_numpy(midpoints(fmt))
    points = points[points == points.float()]  # torch goes through float32
    theirs = points.float().to(dtype).double().numpy()
    ours = cast_array(points.numpy(), fmt)
    inside = np.abs(points.numpy()) < fmt.overflow_limit
    assert same(ours[inside], theirs[inside])
    # Beyond E4M3FN's range torch's answer has changed with its version: NaN at first, later the maximum.
    clipped = cast_array(points.numpy(), fmt, saturate=True)
    beyond = ~inside
    assert same(ours[beyond], theirs[beyond]) or (fmt is E4M3FN and same(clipped[beyond], theirs[beyond]))


def test_scales_agree_with_the_libraries_except_on_zero_and_negatives():
    single = midpoints(E8M0)[:-3]
    points = single[(single >= 2.0**-126) & (single < 2.0**128)]  # float32's subnormals round differently in torch
    ours = cast_array(points, E8M0)
    assert same(ours, points.astype(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    if hasattr(torch, "float8_e8m0fnu"):
        theirs = torch.from_numpy(points).float().to(torch.float8_e8m0fnu).double().numpy()
        inside = points < E8M0.overflow_limit
        assert same(ours[inside], theirs[inside])
    # OCP MX 1.0 has neither a zero nor a sign. ml_dtypes: NaN for both; torch: 2^-127, and the sign is dropped.
    assert cast(0.0, E8M0) == cast(2.0**-140, E8M0) == 2.0**-127
    assert math.isnan(cast(-1.0, E8M0)) and math.isnan(cast_array([-1.0], E8M0)[0])


@pytest.mark.parametrize(("fmt", "dtype"), [(FP32, np.float32), (FP16, np.float16)])
@given(values=st.lists(st.floats(), min_size=1, max_size=30))
@settings(deadline=None)
def test_wide_casts_agree_with_numpy(fmt, dtype, values):
    with np.errstate(all="ignore"):
        assert same(cast_array(values, fmt), np.array(values).astype(dtype))


@given(values=st.lists(st.floats(), min_size=1, max_size=30))
def test_fp64_changes_nothing(values):
    assert same(cast_array(values, FP64), values)


def test_integers_are_clipped_at_both_ends_and_round_ties_to_even():
    assert cast_array([0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 127.5, 1e9, -128.5, -129.0, -1e9], INT8).tolist() == [
        0, 2, 2, 0, -2, 127, 127, 127, -128, -128, -128,
    ]  # fmt: skip
    assert encode(-1.0, INT8) == 0xFF


# --- the two twins ---------------------------------------------------------------------------------------------------

EDGES = st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, 2.0**-1022, 1.7e308, 448.0, 464.0, 465.0, 61440.0])


@params(ALL.values())
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_array_and_scalar_casts_are_twins(fmt, data):
    around = st.floats(-2 * min(fmt.max, 1e307), 2 * min(fmt.max, 1e307))
    tiny = st.floats(-4, 4).map(lambda v: v * fmt.min_normal)
    values = data.draw(st.lists(EDGES | around | tiny | st.floats(allow_nan=False), min_size=1, max_size=20))
    saturate = data.draw(st.booleans())
    scalar = [encode(value, fmt, saturate=saturate) for value in values]
    assert encode_array(values, fmt, saturate=saturate).tolist() == scalar


# --- the ends of the formats ------------------------------------------------------------------------------------------


def test_overflow_and_saturation():
    assert math.isnan(cast(500.0, E4M3FN)) and cast(500.0, E4M3FN, saturate=True) == 448.0
    assert cast(math.inf, E4M3FN, saturate=True) == 448.0 and math.isnan(cast(math.inf, E4M3FN))
    assert cast(61440.0, E5M2) == math.inf and cast(61439.0, E5M2) == 57344.0
    assert cast(-math.inf, E5M2) == -math.inf
    assert math.copysign(1.0, cast(-1e-9, E4M3FN)) == -1.0
    assert cast(-1e-9, FORMATS["E4M3FNUZ"]) == 0.0 and math.copysign(1.0, cast(-1e-9, FORMATS["E4M3FNUZ"])) == 1.0


@pytest.mark.parametrize("name", ["E3M2", "E2M3", "E2M1", "INT8", "INT4"])
def test_formats_without_nan_refuse_it_and_clip(name):
    fmt = FORMATS[name]
    for call in (lambda: cast(math.nan, fmt), lambda: cast_array([1.0, math.nan], fmt)):
        with pytest.raises(ValueError, match=f"{name} has no NaN"):
            call()
    assert cast(1e9, fmt) == fmt.max and cast(-math.inf, fmt) == fmt.min


def test_codes_out_of_range():
    for call in (lambda: decode(256, E4M3FN), lambda: decode(-1, E4M3FN), lambda: decode_array([256], E4M3FN)):
        with pytest.raises((ValueError, OverflowError)):
            call()
    assert cast_array(np.zeros((0, 3)), BF16).shape == (0, 3)
    assert cast(1.0, FP16) == 1.0
