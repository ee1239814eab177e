"""Effects of a cast in which each group of elements has its own scale: a token, channel, head or 128 adjacent features.

A group's scale (FP32, symmetric) brings the group's own amax to the format's maximum, so the result depends only on the
ratio of each element to its group's amax. The log has two histograms of these ratios by binade: one counts elements and
gives shares, the other weighs each element by its group's amax squared and gives the energy of the error. Their length
does not depend on the number of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.cells import (
    Cells,
    Estimate,
    Limits,
    bulk_decibels,
    error_bounds,
    from_error,
    share,
    spread,
    squared_errors,
)
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.histogram import Histograms
from precdoctor.numerics.prediction import Prediction
from precdoctor.numerics.tally import Bins, tally

#: Which elements share a scale: values of ``--scaling``, and prefixes of the log's columns.
GROUPINGS = ("token", "channel", "head", "group128")
#: Entries of a histogram of ratios: down to ``2**-63``, with the last entry open downwards.
LIMIT = 64
#: A ratio is a rounded quotient, so it may fall just outside the binade of the exact one.
_SLACK = 2.0**-22
#: Points per binade that represent the elements in it.
_POINTS = 64


@dataclass(frozen=True)
class GroupHistogram:
    """Elements by their ratio to the amax of their group; the largest element of each group is left out.

    Attributes:
        counts: entry ``r`` counts the elements with ``2**-(r+1) < |x| / amax <= 2**-r``; trailing zeros may be missing.
        energy: entry ``r`` is the sum of ``amax**2`` over the elements that ``counts[r]`` counts.
        elements: number of finite non-zero elements, the largest of each group included.
        sum_sq: sum of squares of all elements.
    """

    counts: tuple[int, ...]
    energy: tuple[float, ...]
    elements: int
    sum_sq: float

    @classmethod
    def of_row(cls, row: Mapping[str, Any], grouping: str) -> GroupHistogram | None:
        """Read a ``tensors`` row's ``<grouping>_hist``, ``<grouping>_energy``, ``exp_hist`` and ``sum_sq``.

        None if the log does not record the grouping.
        """
        counts, energy = row.get(f"{grouping}_hist"), row.get(f"{grouping}_energy")
        if counts is None or energy is None or isinstance(counts, float):  # pandas puts NaN for a missing list
            return None
        elements = sum(int(n) for n in row.get("exp_hist") or ())
        return cls(tuple(map(int, counts)), tuple(map(float, energy)), elements, float(row.get("sum_sq") or 0.0))


def predict_groups(histogram: GroupHistogram, fmt: Format) -> Prediction:
    """Predict a cast to an element format with one scale per group; errors are measured after scaling back."""
    limits = Limits.of(fmt)
    counts = np.array(histogram.counts, dtype=np.float64)
    guessed = cells, points, weights = spread([_cells(counts, fmt)], _POINTS)
    used = counts > 0.0
    per_element = np.array(histogram.energy)[used][::-1] / (cells.counts * fmt.max**2)
    low, high = error_bounds(cells, fmt, limits, aligned=False)
    likely = squared_errors(points, cells, fmt, limits, aligned=False)
    signal = histogram.sum_sq
    noise = [
        float((cells.counts * low**2 * per_element).sum()) * (1.0 - 1e-6),
        float((cells.counts * high**2 * per_element).sum()) * (1.0 + 1e-5),
        float((weights * likely * per_element[:, None]).sum()),
    ]
    error, sqnr = from_error(*(min(part / signal, 1.0) if signal else 0.0 for part in noise))
    nothing = Estimate(0.0, 0.0, 0.0)
    headroom = 0.0 if histogram.elements else math.inf
    return Prediction(
        scale=None,
        elements=histogram.elements,
        flushed=share(limits.flushed, guessed, histogram.elements),
        subnormal=share(limits.subnormal, guessed, histogram.elements),
        saturated=nothing,
        headroom_binades=Estimate(headroom, headroom, headroom),
        relative_error=error,
        sqnr_db=sqnr,
        bulk_sqnr_db=bulk_decibels(points, weights, likely, per_element[:, None]) if fmt.kind is Kind.INTEGER else None,
    )


def _cells(counts: Floats, fmt: Format) -> Cells:
    """Return a cell for each non-empty entry, smallest ratio first, in the unit of ``fmt`` after scaling by group."""
    r = np.arange(counts.size)
    lo = np.where(r < LIMIT - 1, np.ldexp(fmt.max * (1.0 - _SLACK), -r - 1), 0.0)
    hi = np.minimum(np.ldexp(fmt.max * (1.0 + _SLACK), -r), fmt.max)
    used = np.flatnonzero(counts > 0.0)[::-1]
    none = np.zeros(used.size)
    return Cells(lo[used], hi[used], counts[used], none.astype(np.bool_), none)


def tally_groups(
    ratios: Histograms, energy: Floats, elements: Ints, sum_sq: Floats, fmt: Format
) -> tuple[CastCounts, Floats, Bins]:
    """Predict a cast of many tensors from their columns: counts and errors as of :func:`.tally.tally`, and the bins.

    Args:
        ratios: the elements of each tensor by their ratio to the amax of their group; see :class:`GroupHistogram`.
        energy: one entry for each of ``ratios.counts``.
        elements: number of finite non-zero elements of each tensor, shape ``(tensors,)``.
        sum_sq: sum of squares of each tensor, shape ``(tensors,)``.
    """
    used = ratios.counts > 0
    tensor, r, n = ratios.whose[used], ratios.bins[used], ratios.counts[used].astype(np.float64)
    hi = np.ldexp(fmt.max, -r)
    lo = np.where(r < LIMIT - 1, hi / 2.0, 0.0)
    whole = np.flatnonzero(elements)
    peak = np.full(whole.size, fmt.max)
    lo, hi = np.concatenate([lo, peak]), np.concatenate([hi, peak])
    bins = Bins(
        elements.size,
        np.concatenate([tensor, whole]),
        np.concatenate([n, (elements - ratios.total)[whole]]),
        lo,
        hi,
        np.concatenate([np.zeros(n.size, np.bool_), np.ones(whole.size, np.bool_)]),
        lo,
        hi,
    )
    counts, _ = tally(bins, fmt)
    noise = np.bincount(tensor, energy[used] * _likely_errors(fmt)[r], minlength=elements.size).astype(np.float64)
    error = np.minimum(np.divide(noise, sum_sq, out=np.zeros_like(noise), where=sum_sq > 0.0), 1.0)
    return counts, error, bins


@lru_cache(maxsize=64)
def _likely_errors(fmt: Format) -> Floats:
    """Return the expected squared error over ``amax**2`` of an element in each entry, if elements lie evenly in it."""
    even = np.ldexp(1.0, LIMIT - np.arange(LIMIT))
    even[-1] *= 2.0  # the last entry reaches down to zero
    cells, points, weights = spread([_cells(even, fmt)], _POINTS)
    errors = squared_errors(points, cells, fmt, Limits.of(fmt), aligned=False)
    return (weights * errors).sum(axis=1)[::-1] / (even * fmt.max**2)
