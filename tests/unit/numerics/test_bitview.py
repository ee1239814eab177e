"""One number in one format; and what people call formats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.errors import UsageError
from precdoctor.numerics.bitview import bit_view, neighbours
from precdoctor.numerics.blocks import BLOCK_FORMATS
from precdoctor.numerics.casting_array import decode
from precdoctor.numerics.formats import BF16, E4M3FN, E8M0, FORMATS, INT8, SCALE_FORMATS, Kind, format_of_dtype
from precdoctor.numerics.names import find_element_format, find_format
from tests.support.offenders import check_each
from tests.unit.numerics.exact_casts import cast

SMALL = [f for f in FORMATS.values() if f.bits <= 8]


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_neighbours_and_updates_of_every_number(fmt):
    values = sorted({v for v in (decode(c, fmt) for c in range(1 << fmt.bits)) if math.isfinite(v)})
    for i, v in enumerate(values):
        below, above = neighbours(v, fmt)
        assert below == (values[i - 1] if i else None)
        assert above == (values[i + 1] if i + 1 < len(values) else None)
        for update, sign, next_one in zip(
            (bit_view(v, fmt).down, bit_view(v, fmt).up), (-1, 1), (below, above), strict=True
        ):
            if update is None:
                continue
            tie = v + sign * update.size
            assert cast(tie, fmt) == (next_one if update.inclusive else v)
            assert cast(math.nextafter(tie, sign * math.inf), fmt) == next_one
            assert cast(math.nextafter(tie, v), fmt) == v


@given(st.floats(), st.sampled_from([*FORMATS.values(), E8M0]))
def test_a_view_of_anything(value, fmt):
    view = bit_view(value, fmt)
    if view.stored is None:
        assert math.isnan(value) and view.outcome == "not representable"
        return
    bits = view.sign + view.exponent + view.mantissa
    assert len(bits) == fmt.bits and int(bits, 2) == view.code
    assert (view.outcome == "exact") == (view.stored == value or math.isnan(value))
    if view.below is not None and view.outcome == "rounded":
        assert view.below < value and (view.above is None or value < view.above)


@pytest.mark.parametrize(
    ("value", "name", "outcome"),
    [(1e-5, "FP16", "subnormal"), (1e-5, "E4M3FN", "flushed"), (464.0, "E4M3FN", "rounded"), (0.0, "E4M3FN", "exact"),
     (465.0, "E4M3FN", "overflow"), (1e9, "E2M1", "saturated"), (-128.0, "INT8", "exact"),
     (-129.0, "INT8", "saturated"), (-128.5, "INT8", "rounded"), (127.5, "INT8", "saturated"),
     (-1.0, "E8M0", "not representable"), (math.inf, "BF16", "exact")],
)  # fmt: skip
def test_outcomes(value, name, outcome):
    assert bit_view(value, {**FORMATS, **SCALE_FORMATS}[name]).outcome == outcome


def test_numbers_that_are_not_of_the_format():
    for value in (0.3, math.inf, math.nan):
        with pytest.raises(ValueError, match="not a finite number of E4M3FN"):
            neighbours(value, E4M3FN)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("e4m3", "E4M3FN"), ("e4m3fn", "E4M3FN"), ("fp8_e4m3", "E4M3FN"), ("FP8-E4M3FN", "E4M3FN"), ("bf16", "BF16"),
     ("float8_e4m3fn", "E4M3FN"), ("torch.bfloat16", "BF16"), ("torch.float8_e5m2", "E5M2"), ("half", "FP16"),
     ("np.float32", "FP32"), ("tf32", "TF32"), ("float8_e4m3", "E4M3_IEEE"), ("float4_e2m1fn_x2", "E2M1"),
     ("fp4", "E2M1"), ("e8m0", "E8M0"), ("mxfp8", "MXFP8_E4M3"), ("MXFP8 e5m2", "MXFP8_E5M2"), ("nvfp4", "NVFP4"),
     ("1x128", "TILE_1X128"), ("int8", "INT8"), ("fp6_e3m2", "E3M2")],
)  # fmt: skip
def test_spellings(spelling, name):
    assert find_format(spelling).name == name


def test_every_name_finds_itself():
    def check(name):
        assert find_format(name).name == find_format(name.lower().replace("_", "-")).name == name

    check_each(check, [*FORMATS, *SCALE_FORMATS, *BLOCK_FORMATS])


@pytest.mark.parametrize(
    ("spelling", "message"),
    [("e4m4", "did you mean 'E4M3FN'"), ("bfp16", "did you mean"), ("", "known: FP64"),
     ("fp8", "E4M3FN or E5M2; say which"), ("mxfp6", "MXFP6_E3M2 or MXFP6_E2M3"), ("quaternion", "known: FP64")],
)  # fmt: skip
def test_unknown_spellings(spelling, message):
    with pytest.raises(UsageError, match=message):
        find_format(spelling)


def test_element_formats():
    assert find_element_format("bf16") is BF16
    with pytest.raises(UsageError, match="block format"):
        find_element_format("mxfp8")
    with pytest.raises(UsageError, match="scales of blocks"):
        find_element_format("e8m0")
    assert format_of_dtype("torch.int8") is INT8 and INT8.kind is Kind.INTEGER
    for dtype in ("int64", "float8_e8m0fnu", ""):
        with pytest.raises(UsageError, match="no number format for dtype"):
            format_of_dtype(dtype)
