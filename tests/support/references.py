"""What is held against: statistics counted from whole arrays, casts made with every element at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.blocks import BlockFormat, BlockHistogram, ScaleRule, block_divisors, tensor_divisor
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import Format
from precdoctor.numerics.group_prediction import LIMIT, GroupHistogram
from precdoctor.numerics.histogram import ExponentHistogram, bins_of
from precdoctor.numerics.prediction import TensorStatistics

_LARGEST = float(np.finfo(np.float64).max)


def amax_scale(amax: float | None, fmt: Format, *, margin: int = 0, power_of_two: bool = False) -> float:
    """The multiplier that brings ``amax`` to the format's maximum: ``max / amax / 2**margin``.

    A tensor without a non-zero element says nothing about a scale: 1.0.

    Args:
        amax: largest magnitude; None and 0 mean there is none.
        fmt: the format to fill.
        margin: binades to stay below.
        power_of_two: the power of two at or below it instead.

    Raises:
        ValueError: amax is NaN, infinite or negative.
    """
    if amax is None or amax == 0.0:
        return 1.0
    if not 0.0 < amax < math.inf:
        raise ValueError(f"a scale needs a finite amax, got {amax!r}")
    filling = fmt.max / amax if fmt.max / amax < math.inf else _LARGEST
    scale = math.ldexp(filling, min(-margin, 1023 - math.frexp(filling)[1]))
    return math.ldexp(1.0, math.frexp(scale)[1] - 1) if power_of_two else scale


def statistics_of(values: npt.ArrayLike, source: Format | None = None) -> TensorStatistics:
    """Measured from an array of any shape; NaN, Inf and zero are left out."""
    x = np.abs(np.asarray(values, dtype=np.float64)).ravel()
    x = x[(x > 0.0) & (x < math.inf)]
    histogram = histogram_of(x)
    if x.size == 0:
        return TensorStatistics(histogram, source=source)
    with np.errstate(over="ignore", under="ignore"):
        sum_sq = float(np.square(x).sum())
    return TensorStatistics(histogram, float(x.max()), float(x.min()), sum_sq, source)


def blocks_of(matrix: Floats, size: int) -> BlockHistogram:
    """Counted from a matrix, shape ``(rows, columns)``; blocks run along rows, a short last one stands alone."""
    finite = np.where(np.isfinite(matrix), matrix, 0.0)
    padded = np.zeros((matrix.shape[0], -(-matrix.shape[1] // size) * size))
    padded[:, : matrix.shape[1]] = finite
    blocks = padded.reshape(-1, size)
    peak = np.abs(blocks).max(axis=1, initial=0.0)
    used = peak > 0.0
    bins, peak_bins = bins_of(blocks[used]), bins_of(peak[used])
    below = np.minimum(peak_bins[:, None] - bins, BlockHistogram.LIMIT - 1)[blocks[used] != 0.0]
    counts = np.trim_zeros(np.bincount(below, minlength=1), "b")
    return BlockHistogram(size, tuple(counts.tolist()), histogram_of(peak[used]))


def groups_of(groups: npt.ArrayLike) -> GroupHistogram:
    """Counted from a matrix with a group in each row; what is not finite counts as zero."""
    x = np.abs(np.nan_to_num(np.asarray(groups, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0))
    amax = x.max(axis=1, initial=0.0, keepdims=True)
    mantissa, exponent = np.frexp(np.divide(x, amax, out=np.zeros_like(x), where=amax > 0.0))
    place = np.clip(np.where(mantissa == 0.5, 1 - exponent, -exponent), 0, LIMIT - 1)[x > 0.0]
    counts = np.bincount(place, minlength=LIMIT)
    energy = np.bincount(place, np.broadcast_to(amax**2, x.shape)[x > 0.0], minlength=LIMIT)
    counts[0] -= int((amax > 0.0).sum())
    energy[0] = max(energy[0] - float((amax**2).sum()), 0.0) if counts[0] else 0.0
    return GroupHistogram(tuple(counts.tolist()), tuple(energy.tolist()), int((x > 0.0).sum()), float((x**2).sum()))


@dataclass(frozen=True, eq=False)
class BlockCast:
    """What a block cast made of a matrix.

    Attributes:
        values: scaled back, float64, the shape of the input.
        quotients: what the elements were before they were rounded: ``x / scale``; same shape.
        scales: the divisor of every block, tensor scale included, spread over its elements; same shape.
    """

    values: Floats
    quotients: Floats
    scales: Floats


def cast_blocks(matrix: Floats, fmt: BlockFormat, *, rule: ScaleRule | None = None) -> BlockCast:
    """Casts a matrix the way the format's kernels do, elements saturating, and scales it back.

    A block whose scale underflows to zero becomes zero (possible in NVFP4 only). All-zero blocks stay zero.

    Args:
        matrix: finite, float64, shape ``(rows, columns)``; short blocks at the ends stand alone.
        fmt: the block format.
        rule: another scale rule than the format's own.

    Raises:
        ValueError: not two-dimensional, or an element is not finite.
    """
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise ValueError("a block cast needs a matrix of finite numbers")
    rows, columns = matrix.shape
    height, width = fmt.block
    padded = np.zeros((-(-rows // height) * height, -(-columns // width) * width))
    padded[:rows, :columns] = np.abs(matrix)
    amax = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width).max(axis=(1, 3))
    tensor = tensor_divisor(float(amax.max(initial=0.0)), fmt)
    divisors = block_divisors(amax / tensor, fmt, rule or fmt.rule) * tensor
    spread = np.repeat(np.repeat(divisors, height, axis=0), width, axis=1)[:rows, :columns]
    quotients = np.divide(matrix, spread, out=np.zeros_like(matrix), where=spread > 0.0)
    return BlockCast(cast_array(quotients, fmt.element, saturate=True) * spread, quotients, spread)


def histogram_of(values: Any) -> ExponentHistogram:
    """The histogram of an array of any shape, of a dtype that float64 holds exactly; zero, NaN and Inf are left out."""
    x = np.abs(np.asarray(values, dtype=np.float64)).ravel()
    bins = bins_of(x[(x > 0.0) & (x < math.inf)])
    if bins.size == 0:
        return ExponentHistogram(0, np.zeros(0, dtype=np.int64))
    return ExponentHistogram(int(bins.min()), np.bincount(bins - bins.min()).astype(np.int64))
