"""Effects of casting a tensor to a block format, predicted from its block-relative histograms.

A block's scale follows from its own amax, so the fate of an element depends on how many binades it lies below that
amax, and the log counts exactly this. Unknown are the mantissa of the amax (known within its binade) and which relative
histogram belongs to which block. The bounds allow for every possibility; the estimate takes mantissas as evenly spread
over the binade and the elements of all blocks as equally distributed.

The blocks of the log run along the last dimension, so predictions are for contractions along that dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from precdoctor.errors import UsageError
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.blocks import BlockFormat, BlockHistogram, ScaleRule, block_divisors, tensor_divisor
from precdoctor.numerics.cells import (
    Cells,
    Estimate,
    Limits,
    Statement,
    count,
    from_error,
    guess,
    spread,
    squared_errors,
)
from precdoctor.numerics.formats import Format
from precdoctor.numerics.prediction import Prediction

#: The estimate averages over this many mantissas of a block's amax ...
_MANTISSAS = 16
#: ... with this many magnitudes per binade for each of them.
_POINTS = 32


@dataclass(frozen=True)
class _Scales:
    """The facts about the blocks' scales that follow from the blocks' amaxes alone.

    Attributes:
        irregular: ``(bin of amax, number of blocks)`` for blocks whose scale may lie outside its format's normal range.
        flushed: number of blocks whose scale becomes zero: surely, possibly.
        peak: smallest and largest amax of a regular block, in the unit of the elements.
        reach: a regular element ``r`` binades down lies in ``(reach[0] * 2**-r, reach[1] * 2**-r]``, never above peak.
    """

    irregular: tuple[tuple[int, int], ...]
    flushed: tuple[int, int]
    peak: tuple[float, float]
    reach: tuple[float, float]

    @property
    def irregular_blocks(self) -> int:
        return sum(blocks for _, blocks in self.irregular)


def predict_blocks(
    histogram: BlockHistogram, fmt: BlockFormat, *, amax: float | None = None, rule: ScaleRule | None = None
) -> Prediction:
    """Predict a cast to ``fmt`` block by block, round to nearest even, with elements clipped at the maximum.

    Args:
        histogram: of blocks of the format's size.
        fmt: a block format whose blocks are one row high.
        amax: of the whole tensor; required if the format has a tensor scale.
        rule: scale rule to use instead of the format's own (``FLOOR``, ``UP``: power-of-two scales; ``AMAX``).

    Raises:
        UsageError: the log does not record blocks of this shape.
        ValueError: the format has a tensor scale, and ``amax`` is None, not finite or not positive.
    """
    if fmt.block != (1, histogram.size):
        rows, columns = fmt.block
        raise UsageError(
            f"{fmt.name} has blocks of {rows}x{columns}; the histogram is of 1x{histogram.size}: not recorded"
        )
    chosen = rule or fmt.rule
    if fmt.tensor_scale is not None and histogram.amax.total and not (amax and 0.0 < amax < math.inf):
        raise ValueError(f"{fmt.name} has a tensor scale, which needs the tensor's amax; got {amax!r}")
    scales = _scales(histogram, fmt, chosen, amax or math.inf)
    limits = Limits.of(fmt.element)
    cells = _bounds(histogram, scales)
    (likely, points, weights), units = _guess(histogram, fmt, chosen)
    slack = float(min(scales.irregular_blocks * histogram.size, cells.total))
    n = max(cells.total, 1.0)

    def fraction(statement: Statement, at_least: float = 0.0) -> Estimate:
        low, high = count(statement, cells)
        low, high = max(low - slack, at_least, 0.0), min(high + slack, cells.total)
        return Estimate.of(low / n, high / n, guess(statement, points, weights) / n)

    lost = _lost_energy(histogram, scales)
    error, sqnr = from_error(
        0.0,
        min(_most_error(histogram, scales, fmt.element, limits) + lost, 1.0),
        min(_estimated_error((likely, points, weights), units, fmt.element, limits) + lost, 1.0),
    )
    blocks = max(histogram.amax.total, 1)
    sure, possible = scales.flushed
    return Prediction(
        scale=None,
        elements=int(cells.total),
        flushed=fraction(limits.flushed, at_least=sure),
        subnormal=fraction(limits.subnormal),
        saturated=fraction(limits.saturated),
        headroom_binades=_headroom(scales, fmt.element, empty=cells.total == 0.0),
        relative_error=error,
        sqnr_db=sqnr,
        scales_flushed=Estimate.of(sure / blocks, possible / blocks, (sure + possible) / 2.0 / blocks),
    )


def placement(fmt: BlockFormat, rule: ScaleRule) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the range that a normal block scale brings elements to, in the unit of the element format.

    Returns:
        Smallest and largest value the block's amax can have; and the reach: an element ``r`` binades below the amax
        lies in ``(reach[0] * 2**-r, reach[1] * 2**-r]``, never above the largest amax.
    """
    element = fmt.element
    top = math.ldexp(1.0, element.max_exponent)
    # A block's amax is f * 2**k with 1 < f <= 2, and X the ideal divisor over 2**(k - emax).
    if rule is ScaleRule.FLOOR:  # X is 1; at f = 2 exactly it is 2
        return (top, 2.0 * top), (top / 2.0, 2.0 * top)
    if rule is ScaleRule.UP:  # X is 1 while f * 2**emax <= max, then 2
        return (element.max / 2.0, element.max), (top / 2.0, 2.0 * top)
    # X is f * 2**emax / max, give or take half an ulp of the scale's format
    off = math.ldexp(1.0, -fmt.scale.mantissa_bits - 1) * (1.0 + 1e-6)
    peak = element.max / (1.0 + off), element.max / (1.0 - off)
    return peak, (peak[0] / 2.0, peak[1] * 2.0)


def _scales(histogram: BlockHistogram, fmt: BlockFormat, rule: ScaleRule, amax: float) -> _Scales:
    """Find the blocks whose scale may leave its normal range, from the bins of their amax."""
    element, scale = fmt.element, fmt.scale
    top = math.ldexp(1.0, element.max_exponent)
    peak, reach = placement(fmt, rule)
    tensor = tensor_divisor(amax, fmt) if histogram.amax.total else 1.0
    irregular, sure, possible = [], 0, 0
    bins = histogram.amax.trimmed()
    for offset, blocks in enumerate(bins.counts.tolist()):
        k = bins.lo + offset
        low, high = math.ldexp(1.0, k) / tensor, min(math.ldexp(2.0, k), amax) / tensor
        if rule is ScaleRule.AMAX:
            low, high = low / element.max, high / element.max
        else:
            low, high = low / top / 2.0, high / top
        slop = 1.0 + 1e-12
        if blocks and (low < scale.min_normal * slop or high > scale.overflow_limit):
            irregular.append((k, blocks))
            sure += blocks if high * slop <= scale.flush_limit else 0
            possible += blocks if low <= scale.flush_limit * slop else 0
    return _Scales(tuple(irregular), (sure, possible), peak, reach)


def _bounds(histogram: BlockHistogram, scales: _Scales) -> Cells:
    """Return the cells of the elements of regular blocks; the last entry of the histogram is open downwards."""
    counts = np.array(histogram.below, dtype=np.float64)
    r = np.arange(counts.size)
    lo = np.where(r == BlockHistogram.LIMIT - 1, 0.0, np.ldexp(scales.reach[0], -r))
    hi = np.minimum(np.ldexp(scales.reach[1], -r), scales.peak[1])
    used = counts > 0
    none = np.zeros(int(used.sum()))
    return Cells(lo[used], hi[used], counts[used], none.astype(np.bool_), none)


def _guess(histogram: BlockHistogram, fmt: BlockFormat, rule: ScaleRule) -> tuple[tuple[Cells, Floats, Floats], Floats]:
    """Return likely magnitudes: each block's amax at one of several mantissas, the other elements spread below it.

    Returns:
        Cells with their points and weights, shape ``(cells, points)``; and the divisor of each cell, relative to the
        binade of its block's amax, shape ``(cells,)``.
    """
    nothing = np.zeros(0)
    parts = [Cells(nothing, nothing, nothing, nothing.astype(np.bool_), nothing)]
    units = [nothing]
    peaks: list[tuple[float, float]] = []
    counts = np.array(histogram.below, dtype=np.float64)
    blocks = float(histogram.amax.total)
    r = np.flatnonzero(counts)
    for i in range(_MANTISSAS if r.size else 0):
        f = 2.0 ** ((i + 0.5) / _MANTISSAS)
        factor = math.ldexp(1.0, fmt.element.max_exponent) / _likely_divisor(f, i, fmt, rule)
        others = counts[r] / _MANTISSAS
        others[0] = max(counts[r[0]] - blocks, 0.0) / _MANTISSAS  # every block's amax is in entry 0
        lo, hi = np.ldexp(factor, -r), np.minimum(np.ldexp(2.0 * factor, -r), f * factor)
        # Ascending, because points_of needs neighbours in order; each block's amax is a cell of its own, at the end.
        unknown, grid = np.zeros(r.shape, dtype=np.bool_), np.zeros(r.shape)
        units.append(np.full(r.size, 1.0 / factor))
        parts.append(Cells(lo[::-1], hi[::-1], others[::-1], unknown, grid))
        peaks.append((f * factor, 1.0 / factor))
    if peaks:
        places, peak_units = np.array(peaks).T
        parts.append(replace(Cells.at(places), counts=np.full(places.size, blocks / _MANTISSAS)))
        units.append(peak_units)
    return spread(parts, _POINTS), np.concatenate(units)


@lru_cache(maxsize=1024)
def _likely_divisor(f: float, i: int, fmt: BlockFormat, rule: ScaleRule) -> float:
    """Return the divisor of a block whose amax is ``f`` times a power of two, over ``2**(k - emax)``."""
    if rule is not ScaleRule.AMAX:
        divisor = float(block_divisors(np.array([f]), fmt, rule)[0])
        return divisor * math.ldexp(1.0, fmt.element.max_exponent)
    ideal = f * math.ldexp(1.0, fmt.element.max_exponent) / fmt.element.max
    # The rounding of a scale depends on the tensor's scale also: combine every amax with any mantissa.
    mantissa = 2.0 ** (((5 * i) % _MANTISSAS + 0.5) / _MANTISSAS)
    steps = math.ldexp(mantissa, fmt.scale.mantissa_bits)
    return ideal * round(steps) / steps


def _most_error(histogram: BlockHistogram, scales: _Scales, element: Format, limits: Limits) -> float:
    """Bound error energy over signal energy, for any assignment of elements to regular blocks.

    An element has a relative error of half an ulp, or the clipping error, or in the subnormal range an absolute error
    of at most ``flush``. The last adds up to ``size * flush**2`` per block, whose signal is at least its amax squared.
    """
    if not histogram.amax.total:
        return 0.0
    relative = max(math.ldexp(1.0, -element.mantissa_bits - 1), 1.0 - element.max / scales.peak[1])
    return relative**2 + histogram.size * (limits.flush / scales.peak[0]) ** 2


def _lost_energy(histogram: BlockHistogram, scales: _Scales) -> float:
    """Bound the share of the signal energy in irregular blocks, which may lose all their elements."""
    if not scales.irregular:
        return 0.0
    bins = histogram.amax.trimmed()
    least = math.fsum(b * 4.0 ** (k - bins.lo) for k, b in enumerate(bins.counts.tolist(), bins.lo))
    return math.fsum(b * histogram.size * 4.0 ** (k + 1 - bins.lo) for k, b in scales.irregular) / least


def _estimated_error(guessed: tuple[Cells, Floats, Floats], units: Floats, element: Format, limits: Limits) -> float:
    """Return error energy over signal energy, with each cell in the unit of its block."""
    cells, points, weights = guessed
    weights = weights * units[:, None] ** 2
    energy = float((weights * points**2).sum())
    if energy == 0.0:
        return 0.0
    return min(float((weights * squared_errors(points, cells, element, limits, aligned=True)).sum()) / energy, 1.0)


def _headroom(scales: _Scales, element: Format, *, empty: bool) -> Estimate:
    """Binades between the blocks' amax and the maximum, over all regular blocks; unbounded if a block is irregular."""
    if empty:
        return Estimate(math.inf, math.inf, math.inf)
    low, high = (math.log2(element.max / peak) for peak in reversed(scales.peak))
    if scales.irregular_blocks:
        return Estimate(-math.inf, math.inf, (low + high) / 2.0)
    return Estimate(low, high, (low + high) / 2.0)
