"""Counts of flushed and saturated elements for many histograms at once, each with its own scale.

A faster :func:`precdoctor.numerics.prediction.predict` for a whole log: bounds from the same bins, and an estimate
that takes magnitudes as evenly spread over their bin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, Histograms

#: Limits of FP64 that float64 rounds to 0 and to infinity, as exponents with a significand of 0.5.
_FP64_LIMITS = {0.0: -1074, math.inf: 1025}


@dataclass(frozen=True, eq=False)
class HistogramTable:
    """Histograms as rows of one rectangular table.

    Attributes:
        lo: bin of the first column.
        counts: int64, shape ``(rows, bins)``.
        amax: largest magnitude of each row, NaN if unknown; shape ``(rows,)``.
    """

    lo: int
    counts: Ints
    amax: Floats

    @cached_property
    def running(self) -> Floats:
        """Number of elements up to and including each bin, shape of ``counts``."""
        return np.cumsum(self.counts, axis=1).astype(np.float64)

    def rows(self, chosen: Bools) -> HistogramTable:
        """Select rows by a mask."""
        return HistogramTable(self.lo, self.counts[chosen], self.amax[chosen])

    @classmethod
    def of(cls, histograms: Histograms, amax: Floats | None = None) -> HistogramTable:
        """Build a table from concatenated histograms; ``amax`` has the shape ``(rows,)``, None if unknown."""
        rows = histograms.lengths.size
        known = np.full(rows, math.nan) if amax is None else np.asarray(amax, dtype=np.float64)
        if not histograms.counts.size:
            return cls(0, np.zeros((rows, 1), dtype=np.int64), known)
        first = int(histograms.bins.min())
        return cls(first, histograms.window(first, int(histograms.bins.max()) + 1 - first), known)


@dataclass(frozen=True, eq=False)
class CastCounts:
    """Counts of elements per row, float64, shape ``(rows,)``; the truth lies between low and high, both included.

    Attributes:
        total: finite non-zero elements.
    """

    total: Floats
    flushed_low: Floats
    flushed_high: Floats
    flushed: Floats
    saturated_low: Floats
    saturated_high: Floats
    saturated: Floats

    def flushed_share(self) -> Estimate:
        """Flushed elements of all rows together, as a share of the finite non-zero elements."""
        return self._share(self.flushed_low, self.flushed_high, self.flushed)

    def saturated_share(self) -> Estimate:
        """Saturated elements of all rows together, as a share of the finite non-zero elements."""
        return self._share(self.saturated_low, self.saturated_high, self.saturated)

    def row(self, i: int) -> CastCounts:
        return CastCounts(*(getattr(self, f.name)[i : i + 1] for f in fields(self)))

    def summed_by(self, group: Ints, groups: int) -> CastCounts:
        """Add up the rows of each group; one row per group."""
        return CastCounts(
            *(np.bincount(group, getattr(self, f.name), minlength=groups).astype(np.float64) for f in fields(self))
        )

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def zeros(cls, rows: int) -> CastCounts:
        return cls(*(np.zeros(rows) for _ in fields(cls)))

    def _share(self, low: Floats, high: Floats, estimate: Floats) -> Estimate:
        total = max(float(self.total.sum()), 1.0)
        return Estimate.of(float(low.sum()) / total, float(high.sum()) / total, float(estimate.sum()) / total)


def cast_counts(table: HistogramTable, fmt: Format, scale: Floats) -> CastCounts:
    """Count per row what rounding ``tensor * scale`` to nearest in ``fmt`` flushes and saturates.

    Args:
        table: one histogram per row.
        fmt: a floating-point format.
        scale: finite and positive, shape ``(rows,)``.
    """
    total = table.running[:, -1]
    flushed = _up_to(table, fmt.flush_limit, scale, inclusive=True)
    sure_inside, possibly_inside, likely_inside = _up_to(
        table, fmt.overflow_limit, scale, inclusive=not fmt.tie_overflows
    )
    low, high, likely = total - possibly_inside, total - sure_inside, total - likely_inside
    with np.errstate(over="ignore", invalid="ignore"):
        peak = table.amax * scale
        fits = peak < fmt.overflow_limit if fmt.tie_overflows else peak <= fmt.overflow_limit
    known = np.isfinite(table.amax)
    none, some = known & fits, known & ~fits & (total > 0.0)
    low = np.where(none, 0.0, np.where(some, np.maximum(low, 1.0), low))
    high = np.where(none, 0.0, np.maximum(high, low))
    return CastCounts(total, *flushed, low, high, np.clip(likely, low, high))


def _position(limit: float, scale: Floats) -> tuple[Ints, Bools, Floats]:
    """Locate ``limit / scale``: its bin, whether it is the bin's closed end, and its fractional position in the bin.

    Computed from significands and exponents, because a division would round.
    """
    m1, e1 = (0.5, _FP64_LIMITS[limit]) if limit in _FP64_LIMITS else math.frexp(limit)
    m2, e2 = np.frexp(np.asarray(scale))
    bins = np.where(m1 > m2, e1 - e2, e1 - e2 - 1).astype(np.int64)
    ratio = np.where(m1 > m2, m1 / m2, 2.0 * m1 / m2)  # limit / scale over 2**bins, in (1, 2]
    return bins, np.equal(m1, m2), ratio - 1.0


def _up_to(table: HistogramTable, limit: float, scale: Floats, *, inclusive: bool) -> tuple[Floats, Floats, Floats]:
    """Count elements with ``x * scale <= limit`` (``inclusive``) or ``< limit``: surely, possibly, likely."""
    position, closed, depth = _position(limit, scale)
    bins = np.clip(position, EXP_MIN, EXP_MAX)
    below = _running(table.running, bins - 1 - table.lo)
    through = _running(table.running, bins - table.lo)
    open_end = (bins == EXP_MIN) | (bins == EXP_MAX)
    sure = np.where(closed & ~open_end & inclusive, through, below)
    return sure, through, np.maximum(below + (through - below) * np.where(open_end, 0.5, depth), sure)


def _running(running: Floats, column: Ints) -> Floats:
    """Return ``running[i, column[i]]``: 0 before the first column, the total after the last."""
    last = running.shape[1] - 1
    picked = running[np.arange(running.shape[0]), np.clip(column, 0, last)]
    return np.where(column < 0, 0.0, picked)
