"""Bounds and estimates from counts of magnitudes per interval; both kinds of prediction are built on them.

A cell says that ``counts[i]`` magnitudes lie in ``(lo[i], hi[i]]``. A statement about magnitudes is *surely* true of
the cells that lie wholly inside, *possibly* of those that touch, and the two sums bound the true count. Estimates need
an assumption about how magnitudes lie inside a cell; see :func:`points_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import Format, Kind

#: If the source has at most this many mantissa bits, the points are all values that the source can have.
_FEW_BITS = 7
_LARGEST = math.ldexp(1.0, 1023)
#: Share of the elements, counted from the smallest, that :func:`bulk_decibels` measures.
_BULK = 0.9


@dataclass(frozen=True)
class Estimate:
    """A quantity that provably lies in ``[low, high]``, and its most likely value."""

    low: float
    high: float
    estimate: float

    @classmethod
    def of(cls, low: float, high: float, estimate: float) -> Estimate:
        """Clamp the estimate to the bounds."""
        return cls(low, high, min(max(estimate, low), high))

    @classmethod
    def mean(cls, each: Sequence[Estimate], weights: Sequence[float] | None = None) -> Estimate:
        """Return the mean, weighted if there are ``weights``; 0 if they sum to 0."""
        weights = [1.0] * len(each) if weights is None else weights
        total = max(math.fsum(weights), 1.0)
        ends = ([getattr(e, end) for e in each] for end in ("low", "high", "estimate"))
        return cls.of(*(math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total for values in ends))


@dataclass(frozen=True, eq=False)
class Cells:
    """Intervals of magnitudes in the unit of the target format, after scaling; all arrays have shape ``(cells,)``.

    Attributes:
        counts: elements per cell; float64, because an estimate may put a fraction of an element in a cell.
        closed: whether ``lo`` itself belongs to the cell.
        grid: all magnitudes of the cell are multiples of this; 0 if unknown.
    """

    lo: Floats
    hi: Floats
    counts: Floats
    closed: Bools
    grid: Floats

    @property
    def total(self) -> float:
        """Number of elements in all cells."""
        return float(self.counts.sum())

    @classmethod
    def at(cls, magnitudes: Floats) -> Cells:
        """One cell of one element for each known magnitude; any shape, flattened."""
        x = np.ravel(magnitudes)
        return cls(x, x, np.ones(x.shape), np.ones(x.shape, dtype=np.bool_), np.zeros(x.shape))

    def below(self, limit: float, *, inclusive: bool) -> tuple[Bools, Bools]:
        """Return masks of the cells with elements surely, and possibly, at most (``inclusive``) or below ``limit``."""
        if inclusive:
            return self.hi <= limit, (self.lo < limit) | (self.closed & (self.lo <= limit))
        return self.hi < limit, self.lo < limit

    def above(self, limit: float, *, inclusive: bool) -> tuple[Bools, Bools]:
        """Return masks of the cells with elements surely, and possibly, at least (``inclusive``) or above ``limit``."""
        sure, possible = self.below(limit, inclusive=not inclusive)
        return ~possible, ~sure


@dataclass(frozen=True)
class Limits:
    """The thresholds of a cast to a format under round-to-nearest.

    Attributes:
        flush: magnitudes up to and including this become zero.
        normal: smaller magnitudes that are not flushed become subnormal.
        saturate: larger positive numbers are clipped or overflow; with ``tie_overflows`` the limit itself does also.
        saturate_negative: the same for the magnitude of negative numbers; for integers larger by 1.
    """

    flush: float
    normal: float
    saturate: float
    saturate_negative: float
    tie_overflows: bool

    @classmethod
    def of(cls, fmt: Format) -> Limits:
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
        """Return masks of the cells whose elements surely, and possibly, become zero."""
        return cells.below(self.flush, inclusive=True)

    def subnormal(self, cells: Cells) -> tuple[Bools, Bools]:
        """Return masks of the cells whose elements surely, and possibly, become subnormal."""
        not_flushed = cells.above(self.flush, inclusive=False)
        small = cells.below(self.normal, inclusive=False)
        return not_flushed[0] & small[0], not_flushed[1] & small[1] & (cells.lo < self.normal)

    def saturated(self, cells: Cells) -> tuple[Bools, Bools]:
        """Return masks of the cells whose elements are surely, and possibly, out of range, whatever their signs."""
        # A tie at an integer's limit overflows on the positive side (odd code) and stays in range on the negative side.
        tie_negative = self.tie_overflows and self.saturate == self.saturate_negative
        sure, _ = cells.above(self.saturate_negative, inclusive=tie_negative)
        _, possible = cells.above(self.saturate, inclusive=self.tie_overflows)
        return sure, possible


Statement = Callable[[Cells], tuple[Bools, Bools]]
"""Something that is true of a magnitude or not: the cells where it surely is, and those where it possibly is."""


def count(statement: Statement, cells: Cells) -> tuple[float, float]:
    """Count the elements for which a statement such as ``limits.flushed`` is true: minimum and maximum."""
    sure, possible = statement(cells)
    return float(cells.counts[sure].sum()), float(cells.counts[possible].sum())


def guess(statement: Statement, points: Floats, weights: Floats) -> float:
    """Estimate the number of elements for which a statement is true, from points and weights of :func:`points_of`."""
    return float((weights.ravel() * statement(Cells.at(points))[1]).sum())


def share(statement: Statement, guessed: tuple[Cells, Floats, Floats], elements: float) -> Estimate:
    """Bound and estimate the share of ``elements`` for which a statement is true, from cells, points and weights."""
    cells, points, weights = guessed
    low, high = count(statement, cells)
    n = max(elements, 1.0)
    return Estimate.of(low / n, high / n, guess(statement, points, weights) / n)


def spread(parts: Sequence[Cells], per_cell: int = 128) -> tuple[Cells, Floats, Floats]:
    """Concatenate the cells of several parts, with points and weights as from :func:`points_of`.

    The shapes of points and weights are ``(cells, per_cell)``. Cells are neighbours only within a part.
    """
    cells = Cells(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("lo", "hi", "counts", "closed", "grid"))
    )
    guesses = [points_of(part, per_cell) for part in parts]
    return cells, np.concatenate([points for points, _ in guesses]), np.concatenate([weights for _, weights in guesses])


def points_of(cells: Cells, per_cell: int) -> tuple[Floats, Floats]:
    """Return magnitudes that represent the elements of each cell, and the number of elements that each represents.

    Inside a cell the logarithm of the density is taken as the parabola through this cell and its two neighbours: exact
    for power laws and log-normals, close enough for the tails of smooth densities.

    Returns:
        Points and weights, both of shape ``(cells, per_cell)``.
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
    """Slope, and half the second derivative but at most 0, of the parabola through each point and its neighbours."""
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

    If a cell spans many steps of the format, the error is spread evenly: ``step**2 / 12``, times ``1 + 2 / r**2`` when
    the source has only ``r`` values per step. If the cell spans few, or the points are subnormal, out of range or all
    values that the source can have, the points themselves are cast.

    Args:
        points: shape ``(cells, points)``.
        aligned: whether the source's values are multiples of the grid *after* scaling as well (a power-of-two scale).
        unit: unit of the errors, chosen so that their squares stay in float64's range.
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
    """Return bounds of the error of an element in each cell under a saturating cast, in the unit of the format."""
    top = np.minimum(cells.hi, fmt.max)
    half = quantum(top, fmt) / 2.0
    if aligned:
        half = np.where((cells.grid >= 2.0 * half) & (cells.grid > 0.0), 0.0, half)
    high = np.maximum(half, cells.hi - fmt.max)
    flushable = limits.flushed(cells)[1]
    high = np.where(flushable, np.maximum(high, np.minimum(cells.hi, limits.flush)), high)
    high = np.minimum(high, cells.hi)
    reach = -fmt.min  # for an integer, the longer side
    low = np.where(limits.flushed(cells)[0], cells.lo, np.maximum(cells.lo - reach, 0.0))
    known = (cells.lo == cells.hi) & (cells.hi <= fmt.max)
    rounded = cast_array(np.where(known, cells.hi, 0.0), fmt, saturate=True)
    error = np.abs(cells.hi - rounded)
    return np.where(known, error, low), np.where(known, error, high)


def quantum(magnitudes: Floats, fmt: Format) -> Floats:
    """Return the spacing of ``fmt`` at, or just below, each magnitude."""
    mantissa, exponent = np.frexp(np.minimum(magnitudes, _LARGEST))
    below = np.where(mantissa == 0.5, exponent - 2, exponent - 1)
    return np.ldexp(1.0, np.maximum(below, 1 - fmt.bias) - fmt.mantissa_bits)


def bulk_decibels(points: Floats, weights: Floats, errors: Floats, energy: Floats | float = 1.0) -> float:
    """SQNR in dB of the smallest nine tenths of the elements; infinite if none of them has an error.

    The SQNR of the whole tensor says little about them: a few large channels hold most of its energy.

    Args:
        points: magnitudes that represent the elements, shape ``(cells, points)``.
        weights: number of elements that each point represents.
        errors: expected squared error at each point.
        energy: weight of the squares of each cell, shape ``(cells, 1)``.
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
    """Return relative L2 error and SQNR in dB from bounds and estimate of the *squared* relative error."""
    error = Estimate.of(math.sqrt(low), math.sqrt(high), math.sqrt(estimate))
    return error, Estimate(decibels(error.high), decibels(error.low), decibels(error.estimate))


def decibels(relative_error: float) -> float:
    """SQNR of a relative L2 error: ``-20 log10``; infinite for an error of 0."""
    if relative_error == 0.0:
        return math.inf
    return -20.0 * math.log10(relative_error) if relative_error < math.inf else -math.inf
