"""Error of a long dot product in the narrow accumulator of a matrix unit, by simulation.

The model: products of FP8 operands are exact. The unit takes ``group`` of them at a time, aligns them and the running
sum to the largest exponent among them, discards the bits of each beyond ``bits`` significant bits of the largest one,
and adds them. Hopper's FP8 units keep about 14 bits of groups of 32 and *truncate*; truncation always errs towards
zero, so over same-sign products the error grows with K, while round-to-nearest would average out. Promotion adds the
running sum to an FP32 register every ``promote`` products and begins again.

Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.5.2 (14 bits, groups of 32, truncation) and 3.3.2
(promotion every 128).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E4M3FN, FP32

#: Number of dot products per measurement: the mean error is then accurate to a few percent.
SAMPLES = 64
#: Maximum number of products per measurement: longer sums are measured on fewer rows, at least 8 ...
_BUDGET = 1 << 21
#: ... and longer sums than this are measured at this length.
LONGEST = 1 << 18


class Rounding(enum.Enum):
    """How the accumulator discards the bits below its last one."""

    #: IEEE 754-2019, 4.3.1 roundTiesToEven.
    NEAREST = "nearest"
    #: IEEE 754-2019, 4.3.2 roundTowardZero.
    TOWARD_ZERO = "toward-zero"


@dataclass(frozen=True)
class Accumulator:
    """A matrix unit's accumulator.

    Attributes:
        bits: significant bits of the running sum and of the aligned products, the leading one included; FP32 has 24.
        promote: number of products after which the sum moves to an FP32 register; None: never.
        group: number of products that are aligned and added together; 1 is a sequential sum.
        rounding: how bits below the last one are discarded.

    Raises:
        ValueError: ``bits``, ``group`` or ``promote`` is out of range.
    """

    bits: int = 14
    promote: int | None = None
    group: int = 32
    rounding: Rounding = Rounding.TOWARD_ZERO

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 48:
            raise ValueError(f"an accumulator has 2 to 48 significant bits, not {self.bits!r}")
        if self.group < 1:
            raise ValueError(f"an accumulator adds groups of at least 1 product, not {self.group!r}")
        if self.promote is not None and (self.promote < 1 or self.promote % self.group):
            raise ValueError(
                f"promotion comes after whole groups: a multiple of {self.group} products, not {self.promote!r}"
            )


#: The reference accumulator that others are compared with.
FP32_ACCUMULATOR = Accumulator(bits=24, rounding=Rounding.NEAREST)


class Operands(enum.Enum):
    """The two extremes between which real operands lie."""

    #: Normal with mean 0: weights, and activations after a norm.
    ZERO_MEAN = "zero-mean"
    #: Absolute values of normal numbers: ReLU outputs, probabilities, squares.
    SAME_SIGN = "same-sign"


def accumulate(products: Floats, accumulator: Accumulator) -> Floats:
    """Return the sum of each row as the accumulator would compute it, float64, shape ``(rows,)``.

    ``products``: exact, finite, shape ``(rows, K)``.
    """
    rows, length = products.shape
    total, running = np.zeros(rows), np.zeros(rows)
    for first in range(0, length, accumulator.group):
        group = products[:, first : first + accumulator.group]
        largest = np.maximum(np.abs(group).max(axis=1, initial=0.0), np.abs(running))
        quantum = _quantum(largest, accumulator.bits)
        aligned = _cut(group, quantum[:, None], accumulator.rounding).sum(axis=1)
        added = aligned + _cut(running, quantum, accumulator.rounding)
        running = _cut(added, _quantum(np.abs(added), accumulator.bits), accumulator.rounding)
        if accumulator.promote and (first + accumulator.group) % accumulator.promote == 0:
            total, running = cast_array(total + running, FP32), np.zeros(rows)
    return total if not running.any() else cast_array(total + running, FP32)


def _quantum(largest: Floats, bits: int) -> Floats:
    """Return the value of the last of ``bits`` significant bits of each magnitude; 1 for zero."""
    exponent = np.where(largest > 0.0, np.frexp(largest)[1] - 1, bits - 1)
    return np.ldexp(1.0, exponent - (bits - 1))


def _cut(values: Floats, quantum: Floats, rounding: Rounding) -> Floats:
    """Discard the bits of ``values`` below ``quantum``, a power of two."""
    steps = values / quantum  # a power of two: exact
    return (np.trunc(steps) if rounding is Rounding.TOWARD_ZERO else np.rint(steps)) * quantum


@dataclass(frozen=True)
class AccumulationError:
    """Errors of an accumulator's sums against the exact ones.

    Attributes:
        length: products per sum, K.
        relative: root mean square of the error over that of the exact sums.
        mean: mean of error magnitude over exact sum; None unless all exact sums are positive (same-sign operands).
        bias: mean of (sum - exact) over the root mean square of the exact sums; negative for truncated same-sign sums.
        to_terms: mean of error magnitude over the sum of the products' magnitudes, which cancellation does not inflate.
    """

    length: int
    operands: Operands
    accumulator: Accumulator
    relative: float
    mean: float | None
    bias: float
    to_terms: float


@lru_cache(maxsize=1024)
def accumulation_error(length: int, operands: Operands, accumulator: Accumulator = Accumulator()) -> AccumulationError:
    """Measure up to :data:`SAMPLES` dot products of random E4M3 operands at amax scale; the same numbers in every call.

    Sums of more than :data:`LONGEST` products are measured at that length: a lower bound, because errors grow with it.

    The default accumulator is Hopper's, without promotion.

    Raises:
        ValueError: ``length`` is below 1.
    """
    if length < 1:
        raise ValueError(f"a dot product has at least 1 term, not {length!r}")
    products = _products(min(length, LONGEST), operands)
    exact, terms = products.sum(axis=1), np.abs(products).sum(axis=1)
    error = accumulate(products, accumulator) - exact
    size = float(np.sqrt(np.mean(np.square(exact))))
    same = operands is Operands.SAME_SIGN
    return AccumulationError(
        length=length,
        operands=operands,
        accumulator=accumulator,
        relative=float(np.sqrt(np.mean(np.square(error)))) / size if size else 0.0,
        mean=float(np.mean(np.abs(error) / exact)) if same and (exact > 0.0).all() else None,
        bias=float(np.mean(error)) / size if size else 0.0,
        to_terms=float(np.mean(np.divide(np.abs(error), terms, out=np.zeros_like(terms), where=terms > 0.0))),
    )


def _products(length: int, operands: Operands) -> Floats:
    """Return the exact products of random E4M3 operands, shape ``(rows, length)``; always the same."""
    rng = np.random.default_rng(0)
    rows = max(8, min(SAMPLES, _BUDGET // length))
    factors = []
    for _ in range(2):
        x = rng.standard_normal((rows, length))
        x = np.abs(x) if operands is Operands.SAME_SIGN else x
        factors.append(cast_array(x * (E4M3FN.max / np.abs(x).max()), E4M3FN))
    return factors[0] * factors[1]
