"""Counts of flushed and saturated elements for many histograms at once, each with its own scale.

A faster :func:`precdoctor.numerics.prediction.predict` for a whole log: bounds from the same bins, and an estimate
that takes magnitudes as evenly spread over their bin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, Histograms

#: Limits of FP64 that float64 rounds to 0 and to infinity, as exponents with a significand of 0.5.
_FP64_LIMITS = {0.0: -1074, math.inf: 1025}


@dataclass(frozen=True, eq=False)
class CastCounts:
    """Numbers of elements that a cast flushes and saturates.

    Attributes:
        counts: float64, shape ``(7,)`` or ``(7, tensors)``: finite non-zero elements, flushed ones and saturated ones.
            The last two are low bound, high bound and estimate; the truth lies between the bounds, both included.
    """

    counts: Floats

    @classmethod
    def zeros(cls, tensors: int) -> CastCounts:
        return cls(np.zeros((7, tensors)))

    @property
    def elements(self) -> Floats:
        """Finite non-zero elements, shape ``(tensors,)``."""
        return self.counts[0]

    @property
    def flushed(self) -> Floats:
        """Low bound, high bound and estimate, shape ``(3, tensors)``."""
        return self.counts[1:4]

    @property
    def saturated(self) -> Floats:
        """Low bound, high bound and estimate, shape ``(3, tensors)``."""
        return self.counts[4:]

    def shares(self) -> tuple[Estimate, Estimate]:
        """Flushed and saturated elements of all tensors together, as shares of the finite non-zero elements."""
        total, *others = self.counts.reshape(7, -1).sum(axis=1).tolist()
        shares = [count / max(total, 1.0) for count in others]
        return Estimate.of(*shares[:3]), Estimate.of(*shares[3:])

    def row(self, tensor: int) -> CastCounts:
        return CastCounts(self.counts[:, tensor])

    def summed_by(self, group: Ints, groups: int) -> CastCounts:
        """Add up the tensors of each group; one tensor per group."""
        return CastCounts(np.array([np.bincount(group, part, minlength=groups) for part in self.counts]))

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(self.counts + other.counts)


def cast_counts(histograms: Histograms, amax: Floats, fmt: Format, scale: Floats) -> CastCounts:
    """Count per tensor what rounding ``tensor * scale`` to nearest in ``fmt`` flushes and saturates.

    Args:
        histograms: one per tensor.
        amax: largest magnitude of each tensor, NaN if unknown; shape ``(tensors,)``.
        scale: finite and positive, shape ``(tensors,)``.
    """
    total = histograms.total.astype(np.float64)
    flushed = _up_to(histograms, fmt.flush_limit, scale, inclusive=True)
    sure_inside, possibly_inside, likely_inside = _up_to(
        histograms, fmt.overflow_limit, scale, inclusive=not fmt.tie_overflows
    )
    low, high, likely = total - possibly_inside, total - sure_inside, total - likely_inside
    with np.errstate(over="ignore", invalid="ignore"):
        over = fmt.overflows(amax * scale)
    none, some = np.isfinite(amax) & ~over, over & (total > 0.0)
    low = np.where(none, 0.0, np.where(some, np.maximum(low, 1.0), low))
    high = np.where(none, 0.0, np.maximum(high, low))
    return CastCounts(np.array([total, *flushed, low, high, np.clip(likely, low, high)]))


def _position(limit: float, scale: Floats) -> tuple[Ints, Bools, Floats]:
    """Locate ``limit / scale``: its bin, whether it is the bin's closed end, and its fractional position in the bin.

    Computed from significands and exponents, because a division would round.
    """
    m1, e1 = (0.5, _FP64_LIMITS[limit]) if limit in _FP64_LIMITS else math.frexp(limit)
    m2, e2 = np.frexp(np.asarray(scale))
    bins = np.where(m1 > m2, e1 - e2, e1 - e2 - 1).astype(np.int64)
    ratio = np.where(m1 > m2, m1 / m2, 2.0 * m1 / m2)  # limit / scale over 2**bins, in (1, 2]
    return bins, np.equal(m1, m2), ratio - 1.0


def _up_to(histograms: Histograms, limit: float, scale: Floats, *, inclusive: bool) -> tuple[Floats, Floats, Floats]:
    """Count elements with ``x * scale <= limit`` (``inclusive``) or ``< limit``: surely, possibly, likely."""
    position, closed, depth = _position(limit, scale)
    bins = np.clip(position, EXP_MIN, EXP_MAX)
    below, through = (histograms.below(end).astype(np.float64) for end in (bins, bins + 1))
    open_end = (bins == EXP_MIN) | (bins == EXP_MAX)
    sure = np.where(closed & ~open_end & inclusive, through, below)
    return sure, through, np.maximum(below + (through - below) * np.where(open_end, 0.5, depth), sure)
