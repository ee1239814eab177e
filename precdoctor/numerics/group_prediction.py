"""What a cast would do when groups of elements have a scale each: a token, a channel, a head, 128 features in a row.

A group's scale brings its own amax to the format's maximum (symmetric, round to nearest, a scale in FP32), so all that
counts is the ratio of an element to the amax of its group. The log has a histogram of these ratios by binade, and the
same with each element weighted by the square of that amax: the first gives shares, the second the energy of the error.
With few groups and with thousands it is as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.cells import (
    Cells,
    Estimate,
    Limits,
    Statement,
    bulk_decibels,
    error_bounds,
    from_error,
    guess,
    spread,
    squared_errors,
)
from precdoctor.numerics.cells import count as counted
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.prediction import Prediction
from precdoctor.numerics.tally import Bins, Tally, ragged, tally

#: Which elements share a scale, as ``--scaling`` names it and the columns of the log begin.
GROUPINGS = ("token", "channel", "head", "group128")
#: Ratios told apart: down to ``2**-63``, the last entry is open downwards.
LIMIT = 64
#: Ratios are quotients of floating-point numbers: an element may stand one rounding beside its binade.
_SLACK = 2.0**-22
#: Points per binade that stand for the elements in it.
_POINTS = 64


@dataclass(frozen=True)
class GroupHistogram:
    """Elements by how far they lie below the amax of their group; the largest of each group is left out.

    Attributes:
        counts: entry ``r`` counts the elements with ``2**-(r+1) < |x| / amax <= 2**-r``; trailing zeros may be missing.
        energy: entry ``r`` is the sum of ``amax**2`` over them.
        elements: finite and not zero, the largest ones included.
        sum_sq: of all elements.
    """

    counts: tuple[int, ...]
    energy: tuple[float, ...]
    elements: int
    sum_sq: float

    @classmethod
    def of_row(cls, row: Mapping[str, Any], grouping: str) -> GroupHistogram | None:
        """From a ``tensors`` row's ``<grouping>_hist``, ``<grouping>_energy``, ``exp_hist`` and ``sum_sq``.

        Returns:
            None where the grouping is not recorded.
        """
        counts, energy = row.get(f"{grouping}_hist"), row.get(f"{grouping}_energy")
        if counts is None or energy is None or isinstance(counts, float):  # pandas puts NaN for a missing list
            return None
        elements = sum(int(n) for n in row.get("exp_hist") or ())
        return cls(tuple(map(int, counts)), tuple(map(float, energy)), elements, float(row.get("sum_sq") or 0.0))


def predict_groups(histogram: GroupHistogram, fmt: Format) -> Prediction:
    """What casting to ``fmt`` with a scale per group would do; errors are taken after scaling back.

    Args:
        histogram: of the groups.
        fmt: an element format.
    """
    limits = Limits.of(fmt)
    counts = np.array(histogram.counts, dtype=np.float64)
    cells = _cells(counts, fmt)
    _, points, weights = spread([_cells(counts, fmt)], _POINTS)
    n = max(float(histogram.elements), 1.0)

    def fraction(statement: Statement) -> Estimate:
        low, high = counted(statement, cells)
        return Estimate.of(low / n, high / n, guess(statement, points, weights) / n)

    per_element = np.divide(np.array(histogram.energy), counts, out=np.zeros_like(counts), where=counts > 0.0)
    per_element = per_element[counts > 0.0] / fmt.max**2
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
        flushed=fraction(limits.flushed),
        subnormal=fraction(limits.subnormal),
        saturated=nothing,
        headroom_binades=Estimate(headroom, headroom, headroom),
        relative_error=error,
        sqnr_db=sqnr,
        bulk_sqnr_db=bulk_decibels(points, weights, likely, per_element[:, None]) if fmt.kind is Kind.INTEGER else None,
    )


def _cells(counts: Floats, fmt: Format) -> Cells:
    """Where the elements of each entry lie under their group's scale."""
    r = np.arange(counts.size)
    lo = np.where(r < LIMIT - 1, np.ldexp(fmt.max * (1.0 - _SLACK), -r - 1), 0.0)
    hi = np.minimum(np.ldexp(fmt.max * (1.0 + _SLACK), -r), fmt.max)
    used = counts > 0.0
    none = np.zeros(int(used.sum()))
    # From the smallest up, as neighbours are wanted for the guess.
    return Cells(lo[used], hi[used], counts[used], none.astype(np.bool_), none)


def tally_groups(
    lengths: Ints, counts: Ints, energy: Floats, elements: Ints, sum_sq: Floats, fmt: Format
) -> tuple[Tally, Bins]:
    """What becomes of many tensors, from their columns; see :func:`precdoctor.numerics.tally.tally`.

    Args:
        lengths: entries of each tensor's histogram, shape ``(tensors,)``.
        counts: those of all tensors, one after the other; ``energy`` likewise.
        elements: of each tensor, finite and not zero; and ``sum_sq``, of its squares.
        fmt: the format.
    """
    tensor, r = ragged(lengths)
    used = counts > 0
    tensor, r, n = tensor[used], r[used], counts[used].astype(np.float64)
    hi = np.ldexp(fmt.max, -r)
    lo = np.where(r < LIMIT - 1, hi / 2.0, 0.0)
    whole, at = np.flatnonzero(elements), np.bincount(tensor, n, minlength=lengths.size)
    peak = np.full(whole.size, fmt.max)
    lo, hi = np.concatenate([lo, peak]), np.concatenate([hi, peak])
    bins = Bins(
        lengths.size,
        np.concatenate([tensor, whole]),
        np.concatenate([n, (elements - at)[whole]]),
        lo,
        hi,
        np.concatenate([np.zeros(n.size, np.bool_), np.ones(whole.size, np.bool_)]),
        lo,
        hi,
    )
    found = tally(bins, fmt)
    noise = np.bincount(tensor, energy[used] * _likely_errors(fmt)[r], minlength=lengths.size).astype(np.float64)
    error = np.minimum(np.divide(noise, sum_sq, out=np.zeros_like(noise), where=sum_sq > 0.0), 1.0)
    return Tally(found.elements, found.flushed, found.saturated, error), bins


@lru_cache(maxsize=64)
def _likely_errors(fmt: Format) -> Floats:
    """Per entry of a histogram the expected squared error over ``amax**2``."""
    cells = _cells(np.ones(LIMIT), fmt)
    _, points, weights = spread([cells], _POINTS)
    errors = squared_errors(points, cells, fmt, Limits.of(fmt), aligned=False)
    out: Floats = (weights * errors).sum(axis=1) / fmt.max**2
    return out
