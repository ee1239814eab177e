"""The bulk of a tensor without its outliers: what one common scale costs the many small elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.harm import Module, channel_zeros, input_zeros, lost_to
from precdoctor.diagnosis.families.fp8.fp8_casts import Cast, Operand
from precdoctor.diagnosis.families.fp8.fp8_damage import damage, medians, rounding_magnitude
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.blocks import BlockHistogram
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.prediction import TensorStatistics
from precdoctor.numerics.tail import masses

#: Binades above the median magnitude from which an element is an outlier: ten standard deviations of a Gaussian.
REACH = 4
#: Share of a weight gradient made zero by a cast from which the bulk matters whatever its magnitude: the published band
#: for flushed elements (NVIDIA BioNeMo, 4 %).
LOST_CHANNELS = 0.04


@dataclass(frozen=True)
class Bulk:
    """Elements within :data:`REACH` binades of the median magnitude, and below.

    Attributes:
        outliers: share of the non-zero elements outside the bulk.
        magnitude: share of the sum of magnitudes in the bulk.
        distance: binades between the amax of the tensor and the upper end of the bulk.
        flushed: share of the bulk that becomes zero at the scale of the tensor's amax.
        sqnr_db: signal to quantisation noise of the bulk alone at that scale.
        lost_db: how far ``sqnr_db`` is below its value at a scale of the bulk's own; not negative.
        flushed_alone: share of the bulk that becomes zero at a scale of its own.
    """

    outliers: float
    magnitude: float
    distance: float
    flushed: float
    sqnr_db: float
    lost_db: float
    flushed_alone: float


def cut(histogram: ExponentHistogram) -> int:
    """Return the last bin of the bulk."""
    trimmed = histogram.trimmed()
    middle = int(np.searchsorted(np.cumsum(trimmed.counts), (trimmed.total + 1) // 2))
    return trimmed.lo + middle + REACH


def bulk_of(operand: Operand) -> Bulk | None:
    """Return the median bulk over a few steps, field by field; None unless more than half of them have outliers."""
    each = [b for c in operand.spots if (b := _bulk(c, operand.fmt)) is not None]
    if 2 * len(each) <= len(operand.spots):
        return None
    return medians(each)


def _bulk(cast: Cast, fmt: Format) -> Bulk | None:
    """Return the bulk of one cast; None if it has no outliers."""
    histogram = cast.statistics.histogram.trimmed()
    kept = cut(histogram) - histogram.lo + 1
    if kept >= histogram.counts.size or not cast.peak:
        return None
    bulk = histogram[: histogram.lo + kept]
    mass, statistics = masses(histogram), TensorStatistics(bulk)
    top = 2.0 ** (bulk.lo + bulk.counts.size)
    shared = damage(statistics, fmt, fmt.max / cast.peak)
    alone = damage(statistics, fmt, fmt.max / top)
    return Bulk(
        outliers=1.0 - bulk.total / histogram.total,
        magnitude=float(mass[:kept].sum() / mass.sum()),
        distance=float(np.log2(cast.peak / top)),
        flushed=shared.flushed,
        sqnr_db=shared.sqnr_db,
        lost_db=max(0.0, alone.sqnr_db - shared.sqnr_db),
        flushed_alone=alone.flushed,
    )


def lost_channels(view: RunView, operand: Operand) -> float:
    """Return a lower bound of the share of a layer's weight gradient that is zero because of flushed channels.

    The layer is the one whose input or output gradient the operand is. If it lost nothing and the operand is no
    gradient, it is the layer that lost most of those that read the operand. 0 if the operand is a weight, or if nothing
    proves that channels are lost.
    """
    role, flushed = operand.key[3], operand.flushed_share
    if not flushed or role.startswith("weight"):
        return 0.0
    if role.startswith(("input", "grad_output")) and (own := lost_to(view, operand.key[:2], flushed)):
        return own
    if operand.gradient:
        return 0.0
    before = float(np.median((operand.settled.numel - operand.settled.alive) / operand.settled.numel))
    zeros = channel_zeros(view)
    return max((lost_to(view, p, flushed, max(before, zeros[p].came)) for p in readers(view, operand)), default=0.0)


def readers(view: RunView, operand: Operand) -> list[Module]:
    """Return modules with a weight that read the cast's result: as many elements, and the same zeros on every step.

    Casts are often made before the layer, in the module around it or in a module of their own.
    """
    casts = operand.settled[operand.settled.flushed > 0]
    zeros = casts.numel - casts.alive - casts.non_finite + casts.flushed
    left = dict(zip(casts.step.tolist(), zip(casts.numel.tolist(), zeros.tolist(), strict=True), strict=True))
    found = []
    for place, seen in input_zeros(view).items():
        common = left.keys() & seen.keys()
        if place[0] == operand.key[0] and common and all(left[step] == seen[step] for step in common):
            found.append(place)
    return found


def matters(view: RunView, operand: Operand, bulk: Bulk) -> bool:
    """Return whether the bulk holds more of the magnitudes than rounding takes, or channels of it are lost."""
    return bulk.magnitude >= rounding_magnitude(operand.fmt) or lost_channels(view, operand) >= LOST_CHANNELS


def hot_blocks(histogram: BlockHistogram, last_bin: int) -> float:
    """Share of the blocks with an outlier: their amax lies above ``last_bin``."""
    return histogram.amax[last_bin + 1 :].total / max(histogram.amax.total, 1)


def dead_blocks(histogram: BlockHistogram, fmt: Format) -> float:
    """Share of the non-zero blocks that lose every element: their amax, as cast, is flushed."""
    return histogram.amax.flushed(fmt).low / max(histogram.amax.total, 1)
