"""How far the losses of two runs from the same seed lie apart, and how surely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from precdoctor.comparison.spread import student_quantile

#: Steps with a loss in both runs that an interval needs.
FEWEST = 4
#: One tail of the 95 % interval.
_TAIL = 0.025
#: Neighbouring differences resemble each other; beyond this a few steps say nothing of the mean.
_MOST_CORRELATED = 0.95


@dataclass(frozen=True)
class LossGap:
    """Loss of the changed run minus that of the other, over the last half of their common steps.

    Attributes:
        first, last, steps: the window, and how many of its steps count.
        level: the mean loss of the other run there.
        mean: of the differences.
        low, high: 95 % interval of that mean: Student's t, with as many independent steps as the correlation of
            neighbouring differences leaves.
        noise: by how much the other run's own loss scatters from step to step, one standard deviation, its trend left
            out.
        allowed: the gap that counts as none.
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
        """Whether the gap is within what is allowed; None where the interval leaves it open."""
        if self.high <= self.allowed:
            return True
        return False if self.low > self.allowed else None


def loss_gap(before: Mapping[int, float], after: Mapping[int, float], share: float) -> LossGap | None:
    """The gap over the last half of the common steps; None with fewer than :data:`FEWEST` finite losses there.

    Args:
        before, after: loss by step; those that are not finite are left out.
        share: of the loss that a gap may be; half of the run's own noise is allowed where that is more.
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
    """Half of the 95 % interval of the mean of ``values``, which follow each other and may be correlated.

    The number of values is reduced by (1 - r) / (1 + r), r being the correlation of neighbours (Bartlett 1935).
    """
    middle, count = fmean(values), len(values)
    squares = sum((v - middle) ** 2 for v in values)
    if squares == 0.0:
        return 0.0
    products = sum((x - middle) * (y - middle) for x, y in pairwise(values))
    r = min(max(products / squares, 0.0), _MOST_CORRELATED)
    independent = max(2.0, count * (1.0 - r) / (1.0 + r))
    return student_quantile(_TAIL, independent - 1.0) * stdev(values) / math.sqrt(independent)
