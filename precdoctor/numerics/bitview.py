"""One number in one format: its bits, its rounding error, its neighbours, and the smallest update that it retains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.numerics.casting_array import cast_array, decode, encode_array
from precdoctor.numerics.formats import Format, Kind, NaN


@dataclass(frozen=True)
class Update:
    """The smallest change of a stored number, in one direction, that survives round-to-nearest-even.

    Attributes:
        size: half the distance to the neighbour in that direction; at a power of two the two directions differ.
        inclusive: whether a change of exactly ``size``, a tie, survives. If false, only larger ones do: the number's
            own code is even.
    """

    size: float
    inclusive: bool


@dataclass(frozen=True)
class BitView:
    """The result of rounding one number to a format, to nearest, not saturating.

    Attributes:
        format: name of the format.
        value: the number.
        stored: the value in the format; None for NaN in a format without NaN.
        code: its code; None likewise.
        sign: its sign bit as text; empty in a format without a sign.
        exponent: its exponent bits; empty for an integer.
        mantissa: its mantissa bits; for an integer all bits but the sign.
        outcome: ``exact``, ``rounded``, ``subnormal`` (and rounded), ``flushed``, ``saturated``, ``overflow`` or
            ``not representable``.
        relative_error: ``|stored - value| / |value|``; None if either is not finite or the value is zero.
        below: the next smaller number; None at the lower end of the format, or if value or ``stored`` is not finite.
        above: the next larger number; None likewise.
        down: the smallest update downwards that changes the stored number; None if ``below`` is.
        up: the smallest update upwards that changes it; None if ``above`` is.
    """

    format: str
    value: float
    stored: float | None
    code: int | None
    sign: str
    exponent: str
    mantissa: str
    outcome: str
    relative_error: float | None
    below: float | None
    above: float | None
    down: Update | None
    up: Update | None


def bit_view(value: float, fmt: Format) -> BitView:
    """Return the view of ``value`` in ``fmt``; NaN, Inf and both zeros are accepted."""
    if math.isnan(value) and fmt.nan is NaN.NONE:
        return BitView(fmt.name, value, None, None, "", "", "", "not representable", None, None, None, None, None)
    code = int(encode_array([value], fmt)[0])
    stored = decode(code, fmt)
    bits = f"{code:0{fmt.bits}b}"
    split = fmt.sign_bits + fmt.exponent_bits
    finite = math.isfinite(value) and math.isfinite(stored)
    below, above = neighbours(stored, fmt) if finite else (None, None)
    return BitView(
        format=fmt.name,
        value=value,
        stored=stored,
        code=code,
        sign=bits[: fmt.sign_bits],
        exponent=bits[fmt.sign_bits : split],
        mantissa=bits[split:],
        outcome=_outcome(value, stored, fmt),
        relative_error=abs(stored - value) / abs(value) if finite and value != 0.0 else None,
        below=below,
        above=above,
        down=_update(stored, below, code, fmt) if finite else None,
        up=_update(stored, above, code, fmt) if finite else None,
    )


def neighbours(stored: float, fmt: Format) -> tuple[float | None, float | None]:
    """Return the next smaller and next larger finite number of a format; None beyond its ends. -0 and 0 are one number.

    Raises:
        ValueError: ``stored`` is not a finite number of the format.
    """
    if not math.isfinite(stored) or cast_array([stored], fmt)[0] != stored:
        raise ValueError(f"{stored!r} is not a finite number of {fmt.name}")
    if fmt.kind is Kind.INTEGER:
        return (stored - 1.0 if stored > fmt.min else None), (stored + 1.0 if stored < fmt.max else None)
    # Codes without their sign are in the order of the magnitudes, so signed codes are in the order of the values.
    position = int(encode_array([abs(stored)], fmt)[0])
    position = -position if stored < 0.0 else position
    lowest = -fmt.max_code if fmt.sign_bits else 0

    def at(p: int) -> float | None:
        return math.copysign(decode(abs(p), fmt), p) if lowest <= p <= fmt.max_code else None

    return at(position - 1), at(position + 1)


def _update(stored: float, neighbour: float | None, code: int, fmt: Format) -> Update | None:
    if neighbour is None:
        return None
    tie_leaves = neighbour > stored if fmt.kind is Kind.SCALE else code % 2 == 1  # a tie between two scales goes up
    return Update(abs(neighbour - stored) / 2.0, tie_leaves)


def _outcome(value: float, stored: float, fmt: Format) -> str:
    if math.isnan(value) or stored == value:
        return "exact"
    if not math.isfinite(stored):
        return "not representable" if fmt.kind is Kind.SCALE else "overflow"
    if stored == 0.0:
        return "flushed"
    if abs(value) > abs(stored) and stored in {fmt.max, fmt.min} and _is_out_of_range(value, fmt):
        return "saturated"
    if fmt.has_subnormals and abs(stored) < fmt.min_normal:
        return "subnormal"
    return "rounded"


def _is_out_of_range(value: float, fmt: Format) -> bool:
    """Whether a value rounds to a number outside the range of the format."""
    limit = fmt.overflow_limit + (1.0 if value < 0.0 and fmt.kind is Kind.INTEGER else 0.0)
    return abs(value) > limit or (abs(value) == limit and fmt.tie_overflows and value > 0.0) or math.isinf(value)
