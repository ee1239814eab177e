"""The columns of one slot's row of statistics, as the kernels write it and the drain thread reads it.

A slot is an int64 vector of ``INT_WIDTH`` and a float64 vector of ``FLOAT_WIDTH``. Every integer column is a sum or a
minimum, every float column a maximum, a minimum or a sum, so launches into one slot merge by themselves. Every kernel
fills exactly these columns and is tested against ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from precdoctor.numerics import EXP_MAX, EXP_MIN

#: Larger than any order of execution: "no launch yet", "nothing non-finite yet".
NEVER: Final = 1 << 62

NUMEL: Final = 0
LAUNCHES: Final = 1
ORDER: Final = 2  # minimum over launches of the device's launch counter
FIRST_BAD_ORDER: Final = 3  # ORDER, over the launches with a NaN or an Inf
SUBNORMAL: Final = 4
AT_MAX: Final = 5
UNCHANGED: Final = 6
SATURATED: Final = UNCHANGED  # in rows of casts, which have no update
FINGERPRINT: Final = 7
NAN: Final = 8
POS_INF: Final = 9
NEG_INF: Final = 10

#: Exponent histogram: entry 0 counts zeros, entry ``1 + k - EXP_MIN`` bin k.
HIST: Final = 11
HIST_BINS: Final = EXP_MAX - EXP_MIN + 1
HIST_WIDTH: Final = 1 + HIST_BINS

#: Histogram of exponent(intended dw) - exponent(w), clamped to [REL_MIN, REL_MAX]; the last entry is scratch.
REL: Final = HIST + HIST_WIDTH
REL_MIN: Final = -64
REL_MAX: Final = 63
REL_BINS: Final = REL_MAX - REL_MIN + 1
REL_WIDTH: Final = REL_BINS + 1

#: Per block size: elements by binades below their block's amax (the last bin is open-ended; then one scratch entry) ...
BLOCK_SIZES: Final = (16, 32, 128)
BLOCK_BINS: Final = 64
BLOCK_WIDTH: Final = BLOCK_BINS + 1
#: ... and blocks by the exponent of their amax, laid out like HIST (entry 0: all-zero blocks).
_BLOCK: Final = REL + REL_WIDTH
INT_WIDTH: Final = _BLOCK + len(BLOCK_SIZES) * (BLOCK_WIDTH + HIST_WIDTH)

AMAX: Final = 0  # meaningless if no element is finite
AMIN: Final = 1  # smallest non-zero magnitude; +Inf if there is none
SUM: Final = 2
SUM_SQ: Final = 3
FLOAT_WIDTH: Final = 4


def block_hist(block: int) -> int:
    """First column of the relative histogram of blocks of ``block`` elements (16, 32 or 128)."""
    return _BLOCK + BLOCK_SIZES.index(block) * (BLOCK_WIDTH + HIST_WIDTH)


def block_amax(block: int) -> int:
    """First column of the amax histogram of blocks of ``block`` elements."""
    return block_hist(block) + BLOCK_WIDTH


Dimension = tuple[int, int, int]  # size, stride in memory, pitch in logical order; both in elements


def walk(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[Dimension, list[Dimension]]:
    """Return the dimensions that a compiled kernel iterates over: the last, along which blocks run, and the others.

    Args:
        shape: the tensor's; not empty.
        strides: in elements; None for a contiguous tensor.

    Returns:
        The last dimension (one of size 1 for a scalar), and the others, outermost first, merged if possible; at least
        one.
    """
    sizes, pitches = tuple(shape) or (1,), [1]
    for size in reversed(sizes[1:]):
        pitches.insert(0, pitches[0] * size)
    *others, (columns, stride, _) = zip(sizes, strides or pitches, pitches, strict=True)
    merged: list[Dimension] = []
    for size, step, pitch in others:
        if merged and size > 1 and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step, pitch)
        elif size > 1:
            merged.append((size, step, pitch))
    return (columns, stride if columns > 1 else 1, 1), merged or [(1, columns, columns)]
