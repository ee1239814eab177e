"""Casts of one number, written to be read: the reference that the casts of arrays are tested against, code by code."""

import math
from fractions import Fraction

from precdoctor.numerics.casting_array import decode, nan_code
from precdoctor.numerics.formats import Format, Kind, NaN


def encode(value: float, fmt: Format, *, saturate: bool = False) -> int:
    """Return the code that ``value`` rounds to, by IEEE 754-2019, 4.3.1 roundTiesToEven.

    Out of range: the maximum with ``saturate`` (for Inf also, as in OCP OFP8 1.0 section 5.2.1 SAT mode); otherwise
    Inf, or NaN in a format without Inf. Formats with neither always saturate. A scale has no sign, no zero and no
    mantissa: zero becomes its smallest value, because an all-zero block may have any scale; a negative number becomes
    NaN; a tie between two powers of two goes up.

    Args:
        value: any float64.
        fmt: the target format.
        saturate: clip instead of overflowing.

    Raises:
        ValueError: the result is NaN, and the format has none.
    """
    if math.isnan(value) or (fmt.kind is Kind.SCALE and value < 0.0):
        return nan_code(fmt)
    negative = math.copysign(1.0, value) < 0.0 and fmt.kind is not Kind.SCALE
    limit = fmt.max_code + (1 if negative and fmt.kind is Kind.INTEGER else 0)  # -128 exists, 128 does not
    code = limit + 1 if math.isinf(value) else _round_magnitude(abs(value), fmt)
    if code > limit:
        if saturate or fmt.nan is NaN.NONE:
            code = limit
        elif fmt.has_infinity:
            code = fmt.max_code + 1
        else:
            return nan_code(fmt)
    return _with_sign(code, fmt, negative=negative)


def cast(value: float, fmt: Format, *, saturate: bool = False) -> float:
    """Return ``value`` rounded to the format; arguments and errors as of :func:`encode`."""
    return decode(encode(value, fmt, saturate=saturate), fmt)


def _round_magnitude(magnitude: float, fmt: Format) -> int:
    """Round to a code without its sign, as if codes continued above the largest one."""
    if fmt.kind is Kind.SCALE:
        magnitude = max(magnitude, fmt.min_subnormal)
    if magnitude == 0.0:
        return 0
    lowest = 1 - fmt.bias  # exponent of all subnormals and of the first normals
    exponent = math.frexp(magnitude)[1] - 1
    if fmt.kind is not Kind.SCALE:
        exponent = max(exponent, lowest)
    steps = Fraction(magnitude) / Fraction(2) ** (exponent - fmt.mantissa_bits)
    below = math.floor(steps)
    rest = steps - below
    code = below + ((exponent - lowest) << fmt.mantissa_bits)
    tie_goes_up = fmt.kind is Kind.SCALE or code % 2 == 1
    return code + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and tie_goes_up))


def _with_sign(magnitude_code: int, fmt: Format, *, negative: bool) -> int:
    """Set the sign of a code; zero keeps code 0 in formats whose negative zero is NaN."""
    if not negative:
        return magnitude_code
    if fmt.kind is Kind.INTEGER:
        return -magnitude_code & ((1 << fmt.bits) - 1)
    if magnitude_code == 0 and fmt.nan is NaN.NEGATIVE_ZERO:
        return 0  # "UZ": zero has no sign
    return magnitude_code | 1 << (fmt.bits - 1)
