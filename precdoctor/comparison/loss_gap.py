"""Estimates the gap between the losses of two runs from the same seed, with a confidence interval. Used by trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from precdoctor.comparison.spread import student_quantile

#: Fewest steps with a loss in both runs for an interval.
FEWEST = 4
#: Probability of one tail of the 95 % interval.
_TAIL = 0.025
#: Cap on the correlation of neighbouring differences, which would otherwise leave no independent steps.
_MOST_CORRELATED = 0.95


@dataclass(frozen=True)
class LossGap:
    """Loss of the changed run minus loss of the reference, over the last half of their common steps.

    Attributes:
        first, last: the window of steps.
        steps: number of steps in the window with finite losses in both runs.
        level: mean loss of the reference in the window.
        mean: mean difference.
        low, high: 95 % interval of the mean difference: Student's t, the number of steps reduced for the correlation of
            neighbouring differences.
        noise: standard deviation of the reference's loss from step to step, its trend removed.
        allowed: the largest gap that counts as no gap.
    """

    first: int
    last: int
    steps: int
    level: float
    mean: float
    low: float
    high: float
    noise: float
    allowed: float

    @property
    def holds(self) -> bool | None:
        """Whether the gap is at most ``allowed``; None if ``allowed`` lies inside the interval."""
        if self.high <= self.allowed:
            return True
        return False if self.low > self.allowed else None


def loss_gap(before: Mapping[int, float], after: Mapping[int, float], share: float) -> LossGap | None:
    """The gap over the last half of the common steps; None if fewer than :data:`FEWEST` losses there are finite.

    Args:
        before, after: loss by step, of the reference and of the changed run; non-finite losses are left out.
        share: largest allowed gap, as a share of the loss; half of the noise is allowed if that is larger.
    """
    common = sorted(s for s in before.keys() & after.keys() if math.isfinite(before[s]) and math.isfinite(after[s]))
    window = common[len(common) // 2 :]
    if len(window) < FEWEST:
        return None
    own = [before[s] for s in window]
    apart = [after[s] - before[s] for s in window]
    mean, half = fmean(apart), half_width(apart)
    noise = stdev([y - x for x, y in pairwise(own)]) / math.sqrt(2.0)
    allowed = max(share * abs(fmean(own)), noise / 2.0)
    return LossGap(window[0], window[-1], len(window), fmean(own), mean, mean - half, mean + half, noise, allowed)


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of ``values``, a series that may be correlated.

    The number of values is reduced to n (1 - r) / (1 + r), where r is the correlation of neighbours (Bartlett 1935).
    """
    middle, count = fmean(values), len(values)
    squares = sum((v - middle) ** 2 for v in values)
    if squares == 0.0:
        return 0.0
    products = sum((x - middle) * (y - middle) for x, y in pairwise(values))
    r = min(max(products / squares, 0.0), _MOST_CORRELATED)
    independent = max(2.0, count * (1.0 - r) / (1.0 + r))
    return student_quantile(_TAIL, independent - 1.0) * stdev(values) / math.sqrt(independent)
