"""The best loss-scaling policy for a run: the search over initial scale and growth interval.

Two losses are weighed in one currency, the share of gradient elements that never reach the optimizer: a skipped step
loses all of its own, any other step those that are flushed at its scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from precdoctor.numerics.loss_scaling import NEVER, ScalerPolicy, levels, share_lost
from precdoctor.numerics.step_gradients import StepGradients

#: Growth intervals that are tried; the stock one is 2000.
INTERVALS = (50, 100, 200, 500, 1000, 2000, NEVER)
#: Initial scales that are tried: 1 to 2^24, the largest that OPT-sized runs and Megatron (2^32) still come down from.
INITS = tuple(2.0**k for k in range(25))


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
    """Every combination of ``inits`` and ``intervals`` scored on a run, the best first.

    Best is the least ``lost``; among equals the fewest skipped steps, then the longer interval, which probes less, then
    the larger scale, which leaves room for gradients that shrink later on.

    Args:
        gradients: of the run, in order.
        base: where all other settings are taken from; default: torch's.
    """
    base = base or ScalerPolicy()
    scorer = _Scorer(gradients)
    tried = [
        replace(base, init=i, interval=n) for i in inits if base.min_scale <= i <= base.max_scale for n in intervals
    ]
    scores = [scorer.score(policy) for policy in tried]
    return sorted(scores, key=lambda s: (s.lost, s.skipped, -s.policy.interval, -s.policy.init))


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
