"""The best loss-scaling policy for a run: the search over initial scale and growth interval.

Two losses are weighed in one currency, the share of gradient elements that never reach the optimizer: a skipped step
loses all of its own, any other step those that are flushed at its scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from precdoctor.numerics.loss_scaling import ScalerPolicy, levels, share_lost
from precdoctor.numerics.step_gradients import StepGradients

#: Torch's own growth interval.
STOCK_INTERVAL = 2000
#: Growth intervals that are tried: those that a run is long enough to tell apart, and the stock one.
INTERVALS = (50, 100, 200, 500, 1000, STOCK_INTERVAL)
#: Initial scales that are tried: 1 to 2^24; gradients that need more are below anything FP16 was made for.
INITS = tuple(2.0**k for k in range(25))
#: Losses this close count as equal: a hundredth of a percent of the gradient elements.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class PolicyScore:
    """How a policy does on a run.

    Attributes:
        policy: the policy.
        skipped: steps that overflow.
        flushed: mean share of elements flushed over the sampled steps that are not skipped; None without one.
        lost: share of all gradient elements lost either way.
        lowest: smallest scale it comes to.
        highest: largest scale.
    """

    policy: ScalerPolicy
    skipped: int
    flushed: float | None
    lost: float
    lowest: float
    highest: float


def search(
    gradients: Sequence[StepGradients],
    *,
    base: ScalerPolicy | None = None,
    inits: Sequence[float] = INITS,
    intervals: Sequence[int] = INTERVALS,
) -> list[PolicyScore]:
    """Every combination of ``inits`` and ``intervals`` scored on a run, the least ``lost`` first.

    Where several lose the same (to within :data:`TOLERANCE`, with equally few skipped steps), first comes the one in
    the middle of their initial scales, which leaves room on both sides, with the longest interval, which probes least.

    Args:
        gradients: of the run, in order.
        base: where all other settings are taken from; default: torch's.
        inits: initial scales; those outside the limits of ``base`` are left out.
        intervals: growth intervals; of those longer than the run only the shortest is tried.
    """
    base = base or ScalerPolicy()
    scorer = _Scorer(gradients)
    longer = [n for n in intervals if n > len(gradients)]
    told_apart = [n for n in intervals if n <= len(gradients)] + ([_stock(longer)] if longer else [])
    allowed = [scale for scale in inits if base.min_scale <= scale <= base.max_scale]
    tried = [replace(base, init=scale, interval=steps) for scale in allowed for steps in told_apart]
    scores = sorted((scorer.score(p) for p in tried), key=lambda s: (s.lost, s.skipped, -s.policy.interval))
    equal = [s for s in scores if s.lost <= scores[0].lost + TOLERANCE]
    fewest = min((s.skipped for s in equal), default=0)
    equal = [s for s in equal if s.skipped == fewest]
    longest = max((s.policy.interval for s in equal), default=0)
    equal = sorted((s for s in equal if s.policy.interval == longest), key=lambda s: s.policy.init)
    first = equal[len(equal) // 2] if equal else None
    return ([first] if first is not None else []) + [s for s in scores if s is not first]


def _stock(intervals: Sequence[int]) -> int:
    return STOCK_INTERVAL if STOCK_INTERVAL in intervals else min(intervals)


class _Scorer:
    """Scores policies on one run; what is flushed at a scale is worked out once."""

    def __init__(self, gradients: Sequence[StepGradients]) -> None:
        self._gradients = gradients
        self._limits = np.array([g.limit.estimate for g in gradients])
        self._sampled = np.array([i for i, g in enumerate(gradients) if g.histogram is not None], dtype=np.int64)
        self._sums: dict[float, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def score(self, policy: ScalerPolicy) -> PolicyScore:
        skipped, measured, total = 0, 0, 0.0
        lowest, highest = math.inf, 0.0
        for first, stop, state, overflow in levels(policy, self._limits, policy.start()):
            skipped += overflow
            lowest, highest = min(lowest, state.scale), max(highest, state.scale)
            a, b = np.searchsorted(self._sampled, (first, stop - overflow))
            if b > a and state.scale > 0.0:
                sums = self._running_sums(state.scale)
                total += float(sums[b] - sums[a])
                measured += int(b - a)
        mean = total / measured if measured else None
        lost = share_lost(skipped, len(self._gradients), mean or 0.0)
        return PolicyScore(policy, skipped, mean, lost, lowest if lowest < math.inf else policy.init, highest)

    def _running_sums(self, scale: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if scale not in self._sums:
            shares = [self._gradients[i].flushed(scale) for i in self._sampled.tolist()]
            self._sums[scale] = np.concatenate([[0.0], np.cumsum([s.estimate if s else 0.0 for s in shares])])
        return self._sums[scale]
