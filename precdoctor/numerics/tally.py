"""Effects of a cast on many tensors at once: the bounds of :mod:`.prediction`, with a cheaper estimate.

A log has one row per tensor and step, a thousand times as many rows as tensors. This module evaluates all of them in a
few array operations per batch, to find the steps worth a full prediction and to total the effects over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.block_prediction import placement
from precdoctor.numerics.blocks import BlockFormat, BlockHistogram, ScaleRule
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.cells import Cells, Limits, quantum
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, Histograms

_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, eq=False)
class Bins:
    """Histograms of many tensors in the unit of the target format, after scaling.

    Attributes:
        tensor: int64, shape ``(bins,)``: index of the tensor that each bin belongs to.
        lo: bin ``i`` holds ``counts[i]`` magnitudes in ``[lo[i], hi[i]]``, ``lo[i]`` itself only if ``closed[i]``.
        likely_lo, likely_hi: the part of the bin in which the estimate spreads its magnitudes evenly.
    """

    tensors: int
    tensor: Ints
    counts: Floats
    lo: Floats
    hi: Floats
    closed: Bools
    likely_lo: Floats
    likely_hi: Floats

    @classmethod
    def of_histograms(cls, histograms: Histograms, amax: Floats, amin_nonzero: Floats, scale: Floats) -> Bins:
        """Build bins from the columns ``exp_lo, exp_hist, amax, amin_nonzero`` of many rows.

        Args:
            histograms: the exponents of each tensor.
            amax: largest magnitude of each tensor, NaN if unknown; ``amin_nonzero`` likewise for the smallest.
            scale: the multiplier before the cast, finite and positive.
        """
        tensors = histograms.lengths.size
        tensor, k, n = _used(histograms)
        with np.errstate(over="ignore", under="ignore"):
            lo = np.where(k > EXP_MIN, np.ldexp(1.0, k), 0.0)
            hi = np.where(k < EXP_MAX, np.ldexp(1.0, np.minimum(k, 1022) + 1), _LARGEST)
            hi = np.fmax(np.fmin(hi, amax[tensor]), lo)
            top = np.searchsorted(tensor, np.arange(tensors), side="right") - 1  # the last used bin of each tensor
            known = np.flatnonzero(np.bincount(tensor, minlength=tensors).astype(bool) & (amax > 0.0))
            n[top[known]] -= 1.0  # if amax is known, the largest element becomes a bin of its own
            peak = np.minimum(amax[known] * scale[known], _LARGEST)
            closed = amin_nonzero[tensor] >= lo
            lo = np.fmin(np.fmax(lo, amin_nonzero[tensor]), hi)
            lo, hi = lo * scale[tensor], np.minimum(hi * scale[tensor], _LARGEST)
        lo, hi = np.concatenate([lo, peak]), np.concatenate([hi, peak])
        closed = np.concatenate([closed | (lo[: closed.size] == 0.0), np.ones(known.size, dtype=np.bool_)])
        n = np.concatenate([n, np.ones(known.size)])
        return cls(tensors, np.concatenate([tensor, known]), n, lo, hi, closed, lo, hi)

    @classmethod
    def of_blocks(cls, below: Histograms, blocks: Ints, fmt: BlockFormat, rule: ScaleRule) -> Bins:
        """Build bins from ``block<size>_hist, block<size>_amax_hist``. Every scale is taken as a normal number.

        Args:
            below: the elements of each tensor by binades below their block's amax.
            blocks: number of blocks of each tensor, all-zero blocks left out.
        """
        tensor, r, n = _used(below)
        peak, reach = placement(fmt, rule)
        lo = np.where(r == BlockHistogram.LIMIT - 1, 0.0, np.ldexp(reach[0], -r))
        hi = np.minimum(np.ldexp(reach[1], -r), peak[1])
        # The mantissa of a block's amax is unknown, so most elements are taken to lie in the middle half of the
        # possible range.
        middle = math.sqrt(peak[0] * peak[1])
        likely = np.ldexp(middle / math.sqrt(2.0), -r)
        likely_lo, likely_hi = np.maximum(likely, lo), np.minimum(2.0 * likely, np.where(r == 0, middle, hi))
        # One element of each block is the amax itself.
        own = np.flatnonzero(blocks)
        n[r == 0] = np.maximum(n[r == 0] - blocks[tensor[r == 0]], 0.0)
        at = np.ones(own.size)
        return cls(
            below.lengths.size,
            np.concatenate([tensor, own]),
            np.concatenate([n, blocks[own].astype(np.float64)]),
            np.concatenate([lo, at * reach[0]]),
            np.concatenate([hi, at * peak[1]]),
            np.concatenate([lo == 0.0, at == 0.0]),
            np.concatenate([likely_lo, at * peak[0]]),
            np.concatenate([likely_hi, at * peak[1]]),
        )


def tally(bins: Bins, fmt: Format) -> tuple[CastCounts, Floats]:
    """Count what a cast of every tensor of ``bins`` to ``fmt``, round to nearest even, flushes and saturates.

    Each interval contains the one of ``predict``; the estimate takes elements as evenly spread over their bin.

    Also returns the estimated energy of the error of a saturating cast over the energy of each tensor, shape
    ``(tensors,)``; 0 for an empty tensor.
    """
    limits, n = Limits.of(fmt), bins.counts
    cells = Cells(bins.lo, bins.hi, n, bins.closed, np.zeros_like(n))
    sure_flushed, may_flush = limits.flushed(cells)
    sure_clipped, may_clip = limits.saturated(cells)

    def per_tensor(weights: Floats) -> Floats:
        return np.bincount(bins.tensor, weights, minlength=bins.tensors).astype(np.float64)

    width = np.maximum(bins.likely_hi - bins.likely_lo, 0.0)
    below = _share(limits.flush - bins.likely_lo, width, bins.likely_hi <= limits.flush)
    above = _share(bins.likely_hi - limits.saturate, width, bins.likely_lo >= limits.saturate)
    with np.errstate(over="ignore", under="ignore"):
        error = _relative_error(bins, fmt, limits, per_tensor)
    flushed = sure_flushed, may_flush, np.where(may_flush, below, 0.0)
    saturated = sure_clipped, may_clip, np.where(may_clip, above, 0.0)
    return CastCounts(np.array([per_tensor(n), *(per_tensor(n * part) for part in (*flushed, *saturated))])), error


def _share(part: Floats, whole: Floats, all_of_it: Bools) -> Floats:
    """Return ``part / whole``, clipped to 0 .. 1; 0 for an empty whole, 1 where ``all_of_it``."""
    share = np.clip(np.divide(part, whole, out=np.zeros_like(part), where=whole > 0.0), 0.0, 1.0)
    return np.where(all_of_it, 1.0, share)


def _relative_error(bins: Bins, fmt: Format, limits: Limits, per_tensor: Callable[[Floats], Floats]) -> Floats:
    """Return error energy over signal energy per tensor, with elements spread evenly over their bins.

    Then the mean square is ``(a**2 + ab + b**2) / 3`` and the rounding error ``step**2 / 12``.
    """
    peak = np.zeros(bins.tensors)
    np.maximum.at(peak, bins.tensor, bins.likely_hi)
    unit = np.maximum(peak, np.finfo(np.float64).tiny)[bins.tensor]
    a, b = bins.likely_lo / unit, bins.likely_hi / unit
    square = (a * a + a * b + b * b) / 3.0
    middle = np.minimum(np.sqrt(square) * unit, _LARGEST)
    rounding = (quantum(middle, fmt) / unit) ** 2 / 12.0
    lost = np.where(middle <= limits.flush, square, np.minimum(rounding, square))
    beyond = np.maximum(b - np.maximum(fmt.max / unit, a), 0.0)
    share = np.divide(beyond, b - a, out=np.where(b > fmt.max / unit, 1.0, 0.0), where=b > a)
    start = np.maximum(a - fmt.max / unit, 0.0)  # how far the smallest clipped element lies above the maximum
    end = start + beyond
    lost += share * (start * start + start * end + end * end) / 3.0
    known = np.flatnonzero(a == b)
    cast = cast_array(bins.likely_hi[known], fmt, saturate=True) / unit[known]
    lost[known] = (b[known] - cast) ** 2
    energy = per_tensor(bins.counts * square)
    error = per_tensor(bins.counts * lost)
    return np.divide(error, energy, out=np.zeros_like(error), where=energy > 0.0)


def _used(histograms: Histograms) -> tuple[Ints, Ints, Floats]:
    """Return tensor, bin and count of each bin that is not empty."""
    used = histograms.counts > 0
    return histograms.whose[used], histograms.bins[used], histograms.counts[used].astype(np.float64)
