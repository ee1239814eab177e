"""Effects of casting a tensor, predicted from one row of statistics: any format, any scale, without the tensor.

Every quantity is an interval that contains the truth, with a point estimate. If the row proves the answer, the two
ends are equal: flushed under round-to-nearest at power-of-two scales, saturated if amax stays below the limit.
Elements are multiplied by the scale without rounding: exact for FP32 and narrower, whose product fits a float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.cells import (
    Cells,
    Estimate,
    Limits,
    bulk_decibels,
    decibels,
    error_bounds,
    from_error,
    share,
    spread,
    squared_errors,
)
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, bin_of

_LARGEST = float(np.finfo(np.float64).max)
#: ``sum_sq`` was added up in floating point; its relative error may be this large.
_SUM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class TensorStatistics:
    """The columns of a log row that predictions need; all of them over finite elements.

    Attributes:
        histogram: exponents of the non-zero elements.
        amax: largest magnitude; None if unknown, or if every element is zero.
        amin_nonzero: smallest non-zero magnitude; None likewise.
        sum_sq: sum of squares; None if unknown.
        source: the format the elements are in; None if unknown.

    Raises:
        ValueError: amax lies outside the last bin, or amin_nonzero outside the first: the row contradicts itself.
    """

    histogram: ExponentHistogram
    amax: float | None = None
    amin_nonzero: float | None = None
    sum_sq: float | None = None
    source: Format | None = None

    def __post_init__(self) -> None:
        bins = self.histogram.trimmed()
        for name, value, k in (
            ("amax", self.amax, bins.lo + bins.counts.size - 1),
            ("amin_nonzero", self.amin_nonzero, bins.lo),
        ):
            if value is None or (name == "amax" and value == 0.0 and bins.total == 0):
                continue
            if not 0.0 < value < math.inf or bins.total == 0 or bin_of(value) != k:
                raise ValueError(f"{name} {value!r} contradicts the histogram")

    @classmethod
    def of_row(cls, row: Mapping[str, Any], source: Format | None = None) -> TensorStatistics:
        """Read the columns ``exp_lo, exp_hist, amax, amin_nonzero, sum_sq`` of a ``tensors`` row.

        Raises:
            ValueError: the columns contradict each other.
        """
        histogram = ExponentHistogram.of(row.get("exp_lo"), row.get("exp_hist"))
        numbers = [row.get(name) for name in ("amax", "amin_nonzero", "sum_sq")]
        amax, amin, sum_sq = (None if v is None or math.isnan(v) else float(v) for v in numbers)
        return cls(histogram, amax, amin, sum_sq, source)


@dataclass(frozen=True)
class Prediction:
    """The effects of a cast; fractions are of the finite non-zero elements.

    Attributes:
        scale: the multiplier before the cast; None if each block or group has its own.
        elements: number of finite non-zero elements.
        flushed: fraction that becomes zero.
        subnormal: fraction that becomes subnormal and keeps fewer bits.
        saturated: fraction beyond the largest value that still rounds to the maximum: clipped, or turned to Inf or NaN.
        headroom_binades: ``log2(max / (amax * scale))``; negative if the tensor does not fit.
        relative_error: L2 norm of the error over that of the tensor.
        sqnr_db: ``relative_error`` in decibels, ``-20 log10``; -inf if an element becomes Inf.
        scales_flushed: fraction of the blocks whose scale itself becomes zero (NVFP4); None without block scales.
        bulk_sqnr_db: estimated SQNR of the smallest nine tenths of the elements; None unless the format is an integer.
    """

    scale: float | None
    elements: int
    flushed: Estimate
    subnormal: Estimate
    saturated: Estimate
    headroom_binades: Estimate
    relative_error: Estimate
    sqnr_db: Estimate
    scales_flushed: Estimate | None = None
    bulk_sqnr_db: float | None = None


def predict(
    statistics: TensorStatistics, fmt: Format, *, scale: float = 1.0, saturate: bool | None = None
) -> Prediction:
    """Predict a cast of ``tensor * scale`` to ``fmt``, round to nearest even; errors are measured after scaling back.

    A tensor without a finite non-zero element is cast exactly: fractions 0, error 0, SQNR and headroom infinite.

    Args:
        statistics: of the tensor before scaling.
        saturate: clip out-of-range elements rather than turn them into Inf; default: true for a format without Inf.

    Raises:
        ValueError: ``scale`` is not a finite positive number.
    """
    if not 0.0 < scale < math.inf:
        raise ValueError(f"a scale is a finite positive number, got {scale!r}")
    clips = not fmt.has_infinity if saturate is None else saturate
    limits = Limits.of(fmt)
    with np.errstate(over="ignore", under="ignore"):
        guess_of = spread(_parts(statistics, scale))
        cells, points, weights = guess_of

        bulk = None
        if fmt.kind is Kind.INTEGER:
            unit = float(points.max(initial=1.0))  # squares stay in float64's range
            errors = squared_errors(points, cells, fmt, limits, aligned=False, unit=unit)
            bulk = bulk_decibels(points / unit, weights, errors)
        statements = (limits.flushed, limits.subnormal, limits.saturated)
        flushed, subnormal, saturated = (share(statement, guess_of, cells.total) for statement in statements)
        error, sqnr = from_error(*_squared_relative_error(statistics, scale, guess_of, fmt, limits))
    if not clips and saturated.high > 0.0:
        error, sqnr = _with_infinities(error, saturated, cells.total)
    return Prediction(
        scale=scale,
        elements=int(cells.total),
        flushed=flushed,
        subnormal=subnormal,
        saturated=saturated,
        headroom_binades=_headroom(statistics, scale, fmt),
        relative_error=error,
        sqnr_db=sqnr,
        bulk_sqnr_db=bulk,
    )


def _parts(statistics: TensorStatistics, scale: float) -> list[Cells]:
    """Return the bins as cells, times ``scale``, with the smallest and the largest element as cells of their own."""
    histogram = statistics.histogram.trimmed()
    used = np.flatnonzero(histogram.counts)
    k, n = histogram.lo + used, histogram.counts[used].astype(np.float64)
    lo = np.where(k > EXP_MIN, np.ldexp(1.0, k), 0.0)
    hi = np.where(k < EXP_MAX, np.ldexp(1.0, k + 1), _LARGEST)
    closed = np.zeros(k.shape, dtype=np.bool_)
    grid = np.zeros(k.shape)
    if statistics.source is not None:
        grid = np.maximum(np.ldexp(1.0, k - statistics.source.mantissa_bits), statistics.source.min_subnormal)
    known = []
    if statistics.amax and k.size:
        hi[-1] = statistics.amax
        n[-1] -= 1.0
        known.append((statistics.amax, grid[-1]))
    if statistics.amin_nonzero and k.size:
        lo[0], closed[0] = statistics.amin_nonzero, True
        if n[0] > 0.0:  # else both are the same element
            n[0] -= 1.0
            known.append((statistics.amin_nonzero, grid[0]))
    closed |= lo * scale == 0.0  # lo underflows in float64, so an element may be zero itself
    left = n > 0.0
    bins = Cells((lo * scale)[left], (hi * scale)[left], n[left], closed[left], (grid * scale)[left])
    return [bins, *(replace(Cells.at(np.array([v * scale])), grid=np.array([g * scale])) for v, g in known)]


def _squared_relative_error(
    statistics: TensorStatistics, scale: float, guess_of: tuple[Cells, Floats, Floats], fmt: Format, limits: Limits
) -> tuple[float, float, float]:
    """Bound and estimate error energy over signal energy under a saturating cast: low, high, estimate.

    The error of an element never exceeds the element itself (zero and the maximum are both representable), so the
    result is at most 1.
    """
    cells, points, weights = guess_of
    if cells.total == 0.0:
        return 0.0, 0.0, 0.0
    cells = replace(cells, lo=np.minimum(cells.lo, _LARGEST), hi=np.minimum(cells.hi, _LARGEST))
    sure_flushed = limits.flushed(cells)[0]
    if sure_flushed.all():
        return 1.0, 1.0, 1.0
    # All energies are relative to the top bin, so that no square leaves float64's range.
    top = math.frexp(float(cells.hi.max()))[1]
    unit = math.ldexp(1.0, min(max(top, -1000), 1000))
    n, aligned = cells.counts, math.frexp(scale)[0] == 0.5
    lowest, highest = n * (cells.lo / unit) ** 2, n * (cells.hi / unit) ** 2
    least, most = float(lowest.sum()), float(highest.sum())
    likely = float((weights * (points / unit) ** 2).sum())
    energy = (statistics.sum_sq or 0.0) * (scale / unit) ** 2
    if 0.0 < energy < math.inf:
        tight = max(least, energy * (1.0 - _SUM_TOLERANCE)), min(most, energy * (1.0 + _SUM_TOLERANCE))
        if tight[0] <= tight[1]:
            (least, most), likely = tight, energy
    err_low, err_high = error_bounds(cells, fmt, limits, aligned=aligned)
    low = max(float((n * (err_low / unit) ** 2).sum()), least - float(highest[~sure_flushed].sum()))
    high = min(float((n * (err_high / unit) ** 2).sum()), most)
    expected = squared_errors(points, cells, fmt, limits, aligned=aligned, unit=unit)
    estimate = float((weights * expected).sum()) / likely if likely > 0.0 else 1.0
    least *= 1.0 - 1e-9  # the sums above are rounded
    return max(low, 0.0) / most * (1.0 - 1e-9), min(high / least, 1.0) if least > 0.0 else 1.0, min(estimate, 1.0)


def _with_infinities(error: Estimate, saturated: Estimate, elements: float) -> tuple[Estimate, Estimate]:
    """Return error and SQNR of a cast that turns out-of-range elements into Inf; one of them makes both infinite."""
    error = Estimate(
        low=math.inf if saturated.low > 0.0 else error.low,
        high=math.inf,
        estimate=math.inf if saturated.estimate * elements >= 0.5 else error.estimate,
    )
    return error, Estimate(decibels(error.high), decibels(error.low), decibels(error.estimate))


def _headroom(statistics: TensorStatistics, scale: float, fmt: Format) -> Estimate:
    """Bound the binades between ``amax * scale`` and the maximum; infinite for an empty tensor."""
    histogram = statistics.histogram.trimmed()
    if histogram.total == 0:
        return Estimate(math.inf, math.inf, math.inf)
    ceiling = math.log2(fmt.max) - math.log2(scale)
    if statistics.amax:
        exact = ceiling - math.log2(statistics.amax)
        return Estimate(exact, exact, exact)
    k = histogram.lo + histogram.counts.size - 1
    low = -math.inf if k == EXP_MAX else ceiling - (k + 1)
    return Estimate(low, math.inf if k == EXP_MIN else ceiling - k, ceiling - k - 0.5)
