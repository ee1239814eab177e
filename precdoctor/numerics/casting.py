"""The value of one code; :mod:`precdoctor.numerics.casting_array` rounds numbers to codes.

Everything rests on one property of these formats: without the sign, codes are in the order of their values. So the
neighbour of a number is the next code, rounding up is adding one, and "even" is the last bit of the code.
"""

from __future__ import annotations

import math

from precdoctor.numerics.formats import Format, Kind, NaN


def decode(code: int, fmt: Format) -> float:
    """Return the value of a code.

    Raises:
        ValueError: the code has more bits than the format.
    """
    if not 0 <= code < 1 << fmt.bits:
        raise ValueError(f"{fmt.name} has codes from 0 to {(1 << fmt.bits) - 1}, got {code}")
    if fmt.kind is Kind.INTEGER:
        return float(code - (1 << fmt.bits) if code >> (fmt.bits - 1) else code)
    negative = bool(fmt.sign_bits) and code >> (fmt.bits - 1) == 1
    magnitude_code = code & ((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
    if negative and magnitude_code == 0 and fmt.nan is NaN.NEGATIVE_ZERO:
        return math.nan
    if magnitude_code > fmt.max_code:
        infinite = fmt.has_infinity and magnitude_code == fmt.max_code + 1
        return math.copysign(math.inf, -negative or 1) if infinite else math.nan
    magnitude = decode_magnitude(magnitude_code, fmt)
    return -magnitude if negative else magnitude


def decode_magnitude(code: int, fmt: Format) -> float:
    """Return the value of a code without its sign, at most ``fmt.max_code``; the formula is in ``formats.py``."""
    if fmt.kind is Kind.SCALE:
        return math.ldexp(1.0, code - fmt.bias)
    exponent, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    if exponent == 0:
        return math.ldexp(mantissa, 1 - fmt.bias - fmt.mantissa_bits)
    return math.ldexp((1 << fmt.mantissa_bits) + mantissa, exponent - fmt.bias - fmt.mantissa_bits)


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
