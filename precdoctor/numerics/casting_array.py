"""Exact casts of arrays, and the values of single codes.

Everything rests on one property of these formats: without the sign, codes are in the order of their values. So the
neighbour of a number is the next code, rounding up is adding one, and "even" is the last bit of the code.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.formats import Format, Kind, NaN

Codes = npt.NDArray[np.uint64]


def encode_array(values: npt.ArrayLike, fmt: Format, *, saturate: bool = False) -> Codes:
    """Return the codes that ``values`` round to, by IEEE 754-2019, 4.3.1 roundTiesToEven.

    Out of range: the maximum with ``saturate`` (for Inf also, as in OCP OFP8 1.0 section 5.2.1 SAT mode); otherwise
    Inf, or NaN in a format without Inf. Formats with neither always saturate. A scale has no sign, no zero and no
    mantissa: zero becomes its smallest value, because an all-zero block may have any scale; a negative number becomes
    NaN; a tie between two powers of two goes up.

    Args:
        values: any shape; every dtype that float64 holds exactly.
        saturate: clip instead of overflowing.

    Returns:
        uint64, the shape of ``values``.

    Raises:
        ValueError: a result is NaN, and the format has none.
    """
    x = np.asarray(values, dtype=np.float64)
    negative = np.signbit(x) & (fmt.kind is not Kind.SCALE)
    nan = np.isnan(x) | ((x < 0.0) & (fmt.kind is Kind.SCALE))
    limit = fmt.max_code + (negative & (fmt.kind is Kind.INTEGER)).astype(np.int64)
    infinite = np.isinf(x)
    code = _round_magnitudes(np.where(infinite | nan, 0.0, np.abs(x)), fmt)
    beyond = infinite | (code > limit)
    if saturate or fmt.nan is NaN.NONE:
        code = np.where(beyond, limit, code)
    elif fmt.has_infinity:
        code = np.where(beyond, fmt.max_code + 1, code)
    else:
        nan |= beyond
    out = _with_signs(code.astype(np.uint64), fmt, negative)
    if nan.any():
        out = np.where(nan, np.uint64(nan_code(fmt)), out)
    return out


def decode_array(codes: npt.ArrayLike, fmt: Format) -> Floats:
    """Return the values of codes, any shape, as float64; the formula is in ``formats.py``.

    Raises:
        ValueError: a code has more bits than the format.
    """
    code = np.asarray(codes, dtype=np.uint64)
    if fmt.bits < 64 and code.size and int(code.max()) >> fmt.bits:
        raise ValueError(f"{fmt.name} has codes from 0 to {(1 << fmt.bits) - 1}, got {int(code.max())}")
    return _table(fmt)[code] if fmt.bits <= 16 else _values(code, fmt)


def cast_array(values: npt.ArrayLike, fmt: Format, *, saturate: bool = False) -> Floats:
    """Return ``values`` rounded to the format, float64, same shape; arguments and errors as :func:`encode_array`."""
    return decode_array(encode_array(values, fmt, saturate=saturate), fmt)


@functools.cache
def _table(fmt: Format) -> Floats:
    return _values(np.arange(1 << fmt.bits, dtype=np.uint64), fmt)


def _values(code: Codes, fmt: Format) -> Floats:
    if fmt.kind is Kind.INTEGER:
        return np.where(code > fmt.max_code, code.astype(np.float64) - 2.0**fmt.bits, code.astype(np.float64))
    below_sign = np.uint64((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
    magnitude = code & below_sign
    exponent = (magnitude >> np.uint64(fmt.mantissa_bits)).astype(np.int64)
    mantissa = magnitude & np.uint64((1 << fmt.mantissa_bits) - 1)
    first = 0 if fmt.kind is Kind.SCALE else 1  # lowest exponent field of normal numbers
    steps = np.where(exponent >= first, mantissa + np.uint64(1 << fmt.mantissa_bits), mantissa).astype(np.float64)
    with np.errstate(over="ignore"):  # codes of Inf and NaN, replaced below
        value = np.ldexp(steps, np.maximum(exponent, first) - fmt.bias - fmt.mantissa_bits)
    infinite = (magnitude == fmt.max_code + 1) & fmt.has_infinity
    nan = (magnitude > fmt.max_code) | ((code > below_sign) & (magnitude == 0) & (fmt.nan is NaN.NEGATIVE_ZERO))
    value = np.where(infinite, np.inf, np.where(nan, np.nan, value))
    return np.where(code > below_sign, -value, value)


def _round_magnitudes(magnitude: Floats, fmt: Format) -> Ints:
    """Round to codes without signs, as if codes continued above the largest one."""
    if fmt.kind is Kind.SCALE:
        magnitude = np.maximum(magnitude, fmt.min_subnormal)
    lowest = 1 - fmt.bias
    exponent = np.where(magnitude > 0.0, np.frexp(magnitude)[1].astype(np.int64) - 1, lowest)
    if fmt.kind is not Kind.SCALE:
        exponent = np.maximum(exponent, lowest)
    # ldexp is exact here: a subnormal is only ever scaled up, and no format is finer than float64.
    steps = np.ldexp(magnitude, fmt.mantissa_bits - exponent)
    below = np.floor(steps)
    rest = steps - below
    code: Ints = below.astype(np.int64) + ((exponent - lowest) << fmt.mantissa_bits)
    tie_goes_up = (code % 2 == 1) | (fmt.kind is Kind.SCALE)
    code += (rest > 0.5) | ((rest == 0.5) & tie_goes_up)
    return code


def _with_signs(magnitude: Codes, fmt: Format, negative: Bools) -> Codes:
    if fmt.kind is Kind.INTEGER:
        return np.where(negative, (~magnitude + np.uint64(1)) & np.uint64((1 << fmt.bits) - 1), magnitude)
    if fmt.nan is NaN.NEGATIVE_ZERO:
        negative = negative & (magnitude > 0)
    return np.where(negative, magnitude | np.uint64(1 << (fmt.bits - 1)), magnitude)


def decode(code: int, fmt: Format) -> float:
    """:func:`decode_array` of one code."""
    if code < 0:
        raise ValueError(f"{fmt.name} has codes from 0 to {(1 << fmt.bits) - 1}, got {code}")
    return float(decode_array(code, fmt))


def nan_code(fmt: Format) -> int:
    """Return the code of NaN: the quiet and positive one if there are several.

    Raises:
        ValueError: the format has no NaN.
    """
    if fmt.nan is NaN.NONE:
        raise ValueError(f"{fmt.name} has no NaN")
    if fmt.nan is NaN.NEGATIVE_ZERO:
        return 1 << (fmt.bits - 1)
    if fmt.nan is NaN.ALL_ONES:
        return fmt.max_code + 1
    return fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))  # IEEE 754-2019, 6.2.1: the first mantissa bit means quiet
