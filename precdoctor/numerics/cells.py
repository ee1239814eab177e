"""Bounds and estimates from "this many magnitudes lie between here and there": what both kinds of prediction rest on.

A cell says that ``counts[i]`` magnitudes lie in ``(lo[i], hi[i]]``. A statement about magnitudes is then *sure* of the
cells that lie wholly inside, *possible* for those that touch, and the two sums bound the truth. Estimates need a guess
of how magnitudes lie inside a cell; see :func:`points_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import Format, Kind

#: Up to this many source mantissa bits the points are every value the source can have.
_FEW_BITS = 7
_LARGEST = math.ldexp(1.0, 1023)
#: Of the elements, the smallest first.
_BULK = 0.9


@dataclass(frozen=True)
class Estimate:
    """A quantity that provably lies in ``[low, high]``, and the most likely value."""

    low: float
    high: float
    estimate: float

    @property
    def exact(self) -> bool:
        """Whether nothing is left open."""
        return self.low == self.high

    @classmethod
    def of(cls, low: float, high: float, estimate: float) -> Estimate:
        """With the estimate brought inside the bounds."""
        return cls(low, high, min(max(estimate, low), high))


@dataclass(frozen=True, eq=False)
class Cells:
    """Magnitudes in the unit of the format they are cast to, that is after scaling; all arrays have shape ``(cells,)``.

    Attributes:
        counts: elements per cell; float64, because a guess may put a fraction of an element somewhere.
        closed: whether ``lo`` itself belongs to the cell.
        grid: all magnitudes of the cell are multiples of this; 0 where nothing is known.
    """

    lo: Floats
    hi: Floats
    counts: Floats
    closed: Bools
    grid: Floats

    @property
    def total(self) -> float:
        """Elements in all cells."""
        return float(self.counts.sum())

    @classmethod
    def at(cls, magnitudes: Floats) -> Cells:
        """One cell per known magnitude, any shape, flattened."""
        x = np.ravel(magnitudes)
        return cls(x, x, np.ones(x.shape), np.ones(x.shape, dtype=np.bool_), np.zeros(x.shape))

    def below(self, limit: float, *, inclusive: bool) -> tuple[Bools, Bools]:
        """For "at most" or "less than" ``limit``: cells that surely are, and cells that possibly hold such elements."""
        if inclusive:
            return self.hi <= limit, (self.lo < limit) | (self.closed & (self.lo <= limit))
        return self.hi < limit, self.lo < limit

    def above(self, limit: float, *, inclusive: bool) -> tuple[Bools, Bools]:
        """The same for "at least" or "more than" ``limit``."""
        sure, possible = self.below(limit, inclusive=not inclusive)
        return ~possible, ~sure


@dataclass(frozen=True)
class Limits:
    """Where a format, reached by rounding to nearest, changes its behaviour.

    Attributes:
        flush: up to here, and including it, a magnitude becomes zero.
        normal: below it and not flushed, a magnitude becomes subnormal.
        saturate: beyond it a positive number is clipped or overflows (``tie_overflows``: at it, too) ...
        saturate_negative: ... and a negative one; integers reach one further there.
    """

    flush: float
    normal: float
    saturate: float
    saturate_negative: float
    tie_overflows: bool

    @classmethod
    def of(cls, fmt: Format) -> Limits:
        """Of a format."""
        # The largest subnormal has an odd code, so the tie between it and the first normal goes up.
        normal = fmt.min_normal - fmt.flush_limit if fmt.has_subnormals else 0.0
        beyond = 1.0 if fmt.kind is Kind.INTEGER else 0.0
        return cls(
            flush=fmt.flush_limit,
            normal=normal,
            saturate=fmt.overflow_limit,
            saturate_negative=fmt.overflow_limit + beyond,
            tie_overflows=fmt.tie_overflows,
        )

    def flushed(self, cells: Cells) -> tuple[Bools, Bools]:
        """Sure and possible cells of elements that become zero."""
        return cells.below(self.flush, inclusive=True)

    def subnormal(self, cells: Cells) -> tuple[Bools, Bools]:
        """Sure and possible cells of elements that become subnormal."""
        not_flushed = cells.above(self.flush, inclusive=False)
        small = cells.below(self.normal, inclusive=False)
        return not_flushed[0] & small[0], not_flushed[1] & small[1] & (cells.lo < self.normal)

    def saturated(self, cells: Cells) -> tuple[Bools, Bools]:
        """Sure and possible cells of elements beyond the range, whatever their signs."""
        # An integer's limit ties out on the positive side, where its code is odd, and back in on the negative side.
        tie_negative = self.tie_overflows and self.saturate == self.saturate_negative
        sure, _ = cells.above(self.saturate_negative, inclusive=tie_negative)
        _, possible = cells.above(self.saturate, inclusive=self.tie_overflows)
        return sure, possible


Statement = Callable[[Cells], tuple[Bools, Bools]]
"""Something that is true of a magnitude or not: the cells where it surely is, and those where it possibly is."""


def count(statement: Statement, cells: Cells) -> tuple[float, float]:
    """How many elements a statement such as ``limits.flushed`` holds for, at least and at most."""
    sure, possible = statement(cells)
    return float(cells.counts[sure].sum()), float(cells.counts[possible].sum())


def guess(statement: Statement, points: Floats, weights: Floats) -> float:
    """How many of the elements that ``points`` stand for a statement holds for."""
    return float((weights.ravel() * statement(Cells.at(points))[1]).sum())


def spread(parts: Sequence[Cells], per_cell: int = 128) -> tuple[Cells, Floats, Floats]:
    """All cells of several parts, with their points and weights, shape ``(cells, per_cell)``, as :func:`points_of`.

    Cells are neighbours within a part only.
    """
    cells = Cells(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("lo", "hi", "counts", "closed", "grid"))
    )
    guesses = [points_of(part, per_cell) for part in parts]
    return cells, np.concatenate([points for points, _ in guesses]), np.concatenate([weights for _, weights in guesses])


def points_of(cells: Cells, per_cell: int) -> tuple[Floats, Floats]:
    """Magnitudes that stand for the elements of each cell, and how many elements each stands for.

    Inside a cell the logarithm of the density is taken as the parabola through this cell and its two neighbours: exact
    for power laws and log-normals, near enough for the tails of everything smooth.

    Returns:
        Both of shape ``(cells, points)``.
    """
    lo, hi = np.minimum(cells.lo, _LARGEST)[:, None], np.minimum(cells.hi, _LARGEST)[:, None]
    points = lo + (hi - lo) * ((np.arange(per_cell) + 0.5) / per_cell)
    grid = cells.grid[:, None]
    coarse = grid * 2**_FEW_BITS * 1.001 >= hi / 2.0
    snapped = np.ceil(np.divide(points, grid, out=np.zeros_like(points), where=coarse & (grid > 0.0))) * grid
    points = np.where(coarse & (grid > 0.0), np.minimum(snapped, hi), points)
    centre = np.log(np.maximum(lo / 2.0 + hi / 2.0, 1e-300)[:, 0])
    density = np.log(np.maximum(cells.counts, 0.3)) - np.log(np.maximum(hi - lo, 1e-300)[:, 0])
    slope, bend = _parabola(centre, density)
    away = np.log(np.maximum(points, 1e-300)) - centre[:, None]
    weights = np.exp(np.clip(slope[:, None] * away + bend[:, None] * away**2, -30.0, 30.0))
    return points, weights / weights.sum(axis=1, keepdims=True) * cells.counts[:, None]


def _parabola(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """First and half the second derivative of the parabola through each point and its neighbours; lines at the ends."""
    slope, bend = np.zeros_like(x), np.zeros_like(x)
    if x.size < 2:
        return slope, bend
    step = np.diff(x)
    rise = np.diff(y) / np.where(step > 0.0, step, np.inf)
    slope[0], slope[-1] = rise[0], rise[-1]
    if x.size > 2:
        bend[1:-1] = np.minimum((rise[1:] - rise[:-1]) / np.maximum(x[2:] - x[:-2], 1e-9), 0.0)
        slope[1:-1] = (rise[:-1] * step[1:] + rise[1:] * step[:-1]) / np.maximum(step[:-1] + step[1:], 1e-9)
    return slope, bend


def squared_errors(
    points: Floats, cells: Cells, fmt: Format, limits: Limits, *, aligned: bool, unit: float = 1.0
) -> Floats:
    """Expected squared error at each point under a saturating cast, over ``unit**2``.

    Where cells hold many steps of the format, the error is spread evenly: ``step**2 / 12``, times ``1 + 2 / r**2`` when
    the source has just ``r`` values per step. Where they hold few, the points themselves are cast.

    Args:
        points: shape ``(cells, points)``.
        cells: where they come from.
        fmt: the format.
        limits: of the format.
        aligned: the source's values are multiples of the grid *after* scaling as well (a power-of-two scale).
        unit: what to measure errors in, so that their squares stay in float64's range.
    """
    step = quantum(points, fmt)
    grid = cells.grid[:, None]
    ratio = np.divide(step, grid, out=np.full_like(step, np.inf), where=(grid > 0.0) & aligned)
    even = np.where(ratio <= 1.0, 0.0, (step / unit) ** 2 / 12.0 * (1.0 + 2.0 / np.maximum(ratio, 1.0) ** 2))
    few = (np.minimum(cells.hi, _LARGEST) - np.minimum(cells.lo, _LARGEST))[:, None] <= 8.0 * step
    snapped = (grid > 0.0) & (grid * 2**_FEW_BITS * 1.001 >= cells.hi[:, None] / 2.0)
    outside = (points > fmt.max) | (points <= limits.normal)
    rounded = cast_array(points, fmt, saturate=True)
    return np.where(few | snapped | outside, ((points - rounded) / unit) ** 2, even)


def error_bounds(cells: Cells, fmt: Format, limits: Limits, *, aligned: bool) -> tuple[Floats, Floats]:
    """Smallest and largest error an element of each cell can have under a saturating cast; unit: that of the format."""
    top = np.minimum(cells.hi, fmt.max)
    half = quantum(top, fmt) / 2.0
    if aligned:
        half = np.where((cells.grid >= 2.0 * half) & (cells.grid > 0.0), 0.0, half)
    high = np.maximum(half, cells.hi - fmt.max)
    flushable = limits.flushed(cells)[1]
    high = np.where(flushable, np.maximum(high, np.minimum(cells.hi, limits.flush)), high)
    high = np.minimum(high, cells.hi)
    reach = -fmt.min  # of an integer, the longer side
    low = np.where(limits.flushed(cells)[0], cells.lo, np.maximum(cells.lo - reach, 0.0))
    known = (cells.lo == cells.hi) & (cells.hi <= fmt.max)
    rounded = cast_array(np.where(known, cells.hi, 0.0), fmt, saturate=True)
    error = np.abs(cells.hi - rounded)
    return np.where(known, error, low), np.where(known, error, high)


def quantum(magnitudes: Floats, fmt: Format) -> Floats:
    """Distance between the neighbours in ``fmt`` of what lies at, or just below, each magnitude."""
    mantissa, exponent = np.frexp(np.minimum(magnitudes, _LARGEST))
    below = np.where(mantissa == 0.5, exponent - 2, exponent - 1)
    step: Floats = np.ldexp(1.0, np.maximum(below, 1 - fmt.bias) - fmt.mantissa_bits)
    return step


def bulk_decibels(points: Floats, weights: Floats, errors: Floats, energy: Floats | float = 1.0) -> float:
    """SQNR in dB of the smaller nine tenths of the elements; infinite when nothing of them is lost.

    A few large channels hold most of a tensor's energy, and with it the SQNR of the whole.

    Args:
        points: magnitudes that stand for the elements, shape ``(cells, points)``; ``weights``: how many, ``errors``:
            their expected squared errors.
        energy: what squares of each cell count, shape ``(cells, 1)``.
    """
    order = np.argsort(points, axis=None)
    many = np.cumsum(weights.ravel()[order])
    if not many.size:
        return math.inf
    share = np.clip(
        (_BULK * many[-1] - (many - weights.ravel()[order])) / weights.ravel()[order].clip(1e-300), 0.0, 1.0
    )
    counted = (weights * energy).ravel()[order] * share
    noise, signal = (float((counted * part.ravel()[order]).sum()) for part in (errors, np.square(points)))
    return decibels(math.sqrt(noise / signal)) if signal > 0.0 else math.inf


def from_error(low: float, high: float, estimate: float) -> tuple[Estimate, Estimate]:
    """Relative L2 error and SQNR in dB from bounds and estimate of the *squared* relative error."""
    error = Estimate.of(math.sqrt(low), math.sqrt(high), math.sqrt(estimate))
    return error, Estimate(decibels(error.high), decibels(error.low), decibels(error.estimate))


def decibels(relative_error: float) -> float:
    """SQNR of a relative L2 error: ``-20 log10``; infinite when nothing is lost."""
    if relative_error == 0.0:
        return math.inf
    return -20.0 * math.log10(relative_error) if relative_error < math.inf else -math.inf
