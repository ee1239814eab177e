"""The cost of a cast to a narrow format: what becomes zero, what is clipped, and the noise of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.prediction import Prediction, TensorStatistics, predict
from precdoctor.numerics.tail import masses

#: A class whose fields are numbers.
_Numbers = TypeVar("_Numbers")


@dataclass(frozen=True)
class Damage:
    """The cost of a cast.

    Attributes:
        flushed, saturated: shares of the finite non-zero elements.
        lost_magnitude: share of the sum of magnitudes in the flushed elements.
        lost_db: how far ``sqnr_db`` is below that of rounding to the format's mantissa alone; not negative.
    """

    flushed: float
    saturated: float
    lost_magnitude: float
    sqnr_db: float
    lost_db: float

    @classmethod
    def of(cls, found: Prediction, fmt: Format, lost_magnitude: float) -> Damage:
        """Return the likely cost of a predicted cast."""
        sqnr = found.sqnr_db.estimate
        lost_db = max(0.0, rounding_db(fmt) - sqnr)
        return cls(found.flushed.estimate, found.saturated.estimate, lost_magnitude, sqnr, lost_db)

    def is_harmful(self, fmt: Format, lost_db: float) -> bool:
        """Return whether flushing takes more of the magnitudes than rounding does, or the noise is above the limit."""
        return self.lost_magnitude >= rounding_magnitude(fmt) or self.lost_db >= lost_db


def medians(each: Sequence[_Numbers]) -> _Numbers:
    """Return the median of several objects of one class, field by field."""
    first = each[0]
    return type(first)(**{name: median(getattr(one, name) for one in each) for name in vars(first)})


def damage(statistics: TensorStatistics, fmt: Format, multiplier: float = 1.0) -> Damage:
    """Cost of casting ``tensor * multiplier`` to ``fmt``, clipping at its maximum."""
    found = predict(statistics, fmt, scale=multiplier, saturate=True)
    return Damage.of(found, fmt, _flushed_magnitude(statistics.histogram, fmt, multiplier))


def rounding_db(fmt: Format) -> float:
    """SQNR of rounding to the format's mantissa and nothing else: 32.2 dB in E4M3, 26.2 dB in E5M2.

    The error is even over an ulp of ``2**-m``, its square ``4**-m / 12``; significands are spread as 1/x over a binade,
    and the mean of their squares is ``1.5 / ln 2``.
    """
    return 10.0 * math.log10(12.0 * 4.0**fmt.mantissa_bits * 1.5 / math.log(2.0))


def rounding_magnitude(fmt: Format) -> float:
    """Mean of |error| / |x| if only the mantissa is rounded, errors uniform in an ulp: 2.3 % in E4M3, 4.5 % in E5M2."""
    return 2.0**-fmt.mantissa_bits / 4.0 * 0.5 / math.log(2.0)


def _flushed_magnitude(histogram: ExponentHistogram, fmt: Format, multiplier: float) -> float:
    """Share of the sum of magnitudes in elements that become zero."""
    trimmed = histogram.trimmed()
    if not trimmed.counts.size:
        return 0.0
    mass = masses(trimmed)
    # binades between the lower end of the first bin and the flush limit; the bin of the limit counts in proportion
    depth = math.log2(fmt.flush_limit) - math.log2(multiplier) - trimmed.lo
    share = np.clip(depth - np.arange(trimmed.counts.size), 0.0, 1.0)
    return float((mass * share).sum() / mass.sum())
