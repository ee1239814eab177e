"""Loss scaling: simulates a dynamic scaler from the known facts about the gradients of each step.

A scaler multiplies the loss by ``scale``; a step whose gradients then hold an Inf or NaN is skipped and the scale backs
off, and a streak of ``interval`` clean steps lets it grow. The arithmetic is that of ``torch.amp.GradScaler`` (a scale
in FP32, factors in FP64), which has no floor and whose ceiling is FP32's: it grows to 2^127 and halves to 0.

The search for the best policy adds up one loss, the share of gradient elements that never reach the optimizer: all
elements of a skipped step, and those of any other step that are flushed at its scale.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2; torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import FP32
from precdoctor.numerics.step_gradients import StepGradients

#: An interval longer than any run: the scale stays until it overflows.
NEVER = 1 << 62
#: Growth interval of ``torch.amp.GradScaler``, in steps.
STOCK_INTERVAL = 2000
#: Growth intervals that the search tries: those short enough to matter in a run, and the stock one.
INTERVALS = (50, 100, 200, 500, 1000, STOCK_INTERVAL)
#: Initial scales that the search tries: 1 to 2^24; gradients that need more are too small for FP16.
INITS = tuple(2.0**k for k in range(25))
#: Losses that differ by less count as equal: a hundredth of a percent of the gradient elements.
TOLERANCE = 1e-4


def _fp32(value: float) -> float:
    """Round once to FP32; Inf out of range."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True)
class ScalerState:
    """The state of a scaler before a step.

    Attributes:
        scale: the multiplier of the loss; a float32 value.
        growth_tracker: clean steps since the scale last changed or a step overflowed.
    """

    scale: float
    growth_tracker: int = 0


@dataclass(frozen=True, kw_only=True)
class ScalerPolicy:
    """The arguments of ``torch.amp.GradScaler``, and two limits that it does not have.

    Attributes:
        growth: factor after ``interval`` clean steps in a row.
        backoff: factor after an overflow.
        interval: clean steps until growth; :data:`NEVER` disables growth.
        min_scale: backing off stops here; torch has no floor.
        max_scale: growing stops here; torch stops at the largest FP32 number.

    Raises:
        ValueError: a factor or limit is out of its range; the message has the value.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = STOCK_INTERVAL
    min_scale: float = 0.0
    max_scale: float = FP32.max

    def __post_init__(self) -> None:
        if not 0.0 < self.init <= FP32.max:
            raise ValueError(f"the initial loss scale is a positive FP32 number, not {self.init!r}")
        if not 1.0 <= self.growth < math.inf:
            raise ValueError(f"the growth factor is at least 1, not {self.growth!r}")
        if not 0.0 < self.backoff <= 1.0:
            raise ValueError(f"the backoff factor lies above 0 and at most at 1, not at {self.backoff!r}")
        if self.interval < 1:
            raise ValueError(f"the growth interval is at least 1 step, not {self.interval!r}")
        if not 0.0 <= self.min_scale <= self.init <= self.max_scale:
            raise ValueError(
                f"the initial loss scale {self.init:g} does not lie between the smallest {self.min_scale:g} "
                f"and the largest {self.max_scale:g}"
            )

    @classmethod
    def static(cls, scale: float) -> ScalerPolicy:
        """A scale that never changes; steps that overflow are still skipped."""
        return cls(init=scale, growth=1.0, backoff=1.0, interval=NEVER)

    def start(self) -> ScalerState:
        return ScalerState(_fp32(self.init))

    def after(self, state: ScalerState, *, overflow: bool) -> ScalerState:
        """Return the state that ``update()`` turns ``state`` into (torch: ``_amp_update_scale_``)."""
        if overflow:
            smaller = _fp32(state.scale * self.backoff)
            return ScalerState(max(smaller, min(_fp32(self.min_scale), state.scale)))
        clean = state.growth_tracker + 1
        if clean < self.interval:
            return ScalerState(state.scale, clean)
        larger = _fp32(state.scale * self.growth)
        return ScalerState(min(larger, max(_fp32(self.max_scale), state.scale)) if larger < math.inf else state.scale)


@dataclass(frozen=True)
class SimulatedStep:
    """One step under a policy.

    Attributes:
        growth_tracker: the scaler's counter before the step.
        overflow: whether the step overflows and is skipped.
        certain: whether the evidence proves ``overflow``; otherwise it is the likelier outcome.
    """

    step: int
    scale: float
    growth_tracker: int
    overflow: bool
    certain: bool


@dataclass(frozen=True)
class ScalerReplay:
    """The simulation of one policy over a run.

    Attributes:
        end: state of the scaler after the last step.
        flushed: mean share of gradient elements flushed over the sampled steps that are not skipped; None if there are
            no such steps.
        flushed_steps: number of steps in that mean.
    """

    policy: ScalerPolicy
    steps: tuple[SimulatedStep, ...]
    end: ScalerState
    flushed: Estimate | None
    flushed_steps: int

    @property
    def overflow_steps(self) -> tuple[int, ...]:
        """Numbers of the steps that would have been skipped."""
        return tuple(s.step for s in self.steps if s.overflow)

    @property
    def uncertain_steps(self) -> int:
        """Number of steps for which the log does not prove whether they overflow at the simulated scale."""
        return sum(not s.certain for s in self.steps)

    @property
    def lost(self) -> float:
        """Share of all gradient elements lost: those of skipped steps, and the flushed ones of the others."""
        return share_lost(len(self.overflow_steps), len(self.steps), self.flushed.estimate if self.flushed else 0.0)


def simulate(
    policy: ScalerPolicy, gradients: Sequence[StepGradients], start: ScalerState | None = None
) -> ScalerReplay:
    """Simulate ``policy`` over these steps, one scaler update each.

    If the evidence does not prove whether a step overflows, the estimate decides, and the step is not ``certain``.

    ``start``: the scaler's state before the first step; default: the policy's initial state.
    """
    limits = np.array([g.limit.estimate for g in gradients])
    state, steps, flushed = start or policy.start(), [], []
    for first, stop, before, overflow in levels(policy, limits, state):
        for i in range(first, stop):
            over = overflow and i == stop - 1
            certain = gradients[i].limit.overflows(before.scale) is not None
            tracker = before.growth_tracker + i - first
            steps.append(SimulatedStep(gradients[i].step, before.scale, tracker, over, certain))
            share = None if over or before.scale == 0.0 else gradients[i].flushed(before.scale)
            if share is not None:
                flushed.append(share)
        last = ScalerState(before.scale, before.growth_tracker + stop - 1 - first)
        state = policy.after(last, overflow=overflow)
    return ScalerReplay(policy, tuple(steps), state, Estimate.mean(flushed) if flushed else None, len(flushed))


def levels(policy: ScalerPolicy, limits: Floats, state: ScalerState) -> Iterator[tuple[int, int, ScalerState, bool]]:
    """Yield stretches of steps that end in an overflow, in growth or at the last step: first, stop, state, overflow.

    ``state`` is the state before step ``first``. The steps inside a stretch are not visited one by one, which makes a
    search over policies fast.

    ``limits``: smallest scale at which each step overflows, shape ``(steps,)``.
    """
    hits: dict[float, Ints] = {}
    first = 0
    while first < limits.size:
        if state.scale not in hits:
            if len(hits) >= 256:  # factors that are no powers of two produce new scales without end
                hits.clear()
            hits[state.scale] = np.flatnonzero(limits <= state.scale)
        over = hits[state.scale]
        at = int(np.searchsorted(over, first))
        overflow = int(over[at]) if at < over.size else NEVER
        grows = first + max(policy.interval - state.growth_tracker, 1) - 1
        stop = min(overflow, grows, limits.size - 1) + 1
        skipped = overflow == stop - 1
        yield first, stop, state, skipped
        state = policy.after(ScalerState(state.scale, state.growth_tracker + stop - 1 - first), overflow=skipped)
        first = stop


def share_lost(skipped: int, steps: int, flushed: float) -> float:
    """Share of gradient elements lost if ``skipped`` steps lose all of theirs and the others ``flushed`` on average."""
    return (skipped + (steps - skipped) * flushed) / steps if steps else 0.0


@dataclass(frozen=True)
class PolicyScore:
    """The outcome of a policy on a run.

    Attributes:
        skipped: number of steps that overflow.
        flushed: mean share of elements flushed over the sampled steps that are not skipped; None if there are none.
        lost: share of all gradient elements lost to skipped steps and flushing.
        lowest, highest: smallest and largest scale during the run.
    """

    policy: ScalerPolicy
    skipped: int
    flushed: float | None
    lost: float
    lowest: float
    highest: float


def search(gradients: Sequence[StepGradients], base: ScalerPolicy | None = None) -> list[PolicyScore]:
    """Score every combination of :data:`INITS` and :data:`INTERVALS` on a run, the least ``lost`` first.

    If several lose the same (to within :data:`TOLERANCE`, with equally few skipped steps), the first is the one with
    the longest interval, which causes the fewest trial overflows, and among these the one in the middle of their
    initial scales, which leaves room on both sides.

    ``base``: policy that all other settings are taken from; default: torch's.
    """
    scorer = _Scorer(gradients)
    # Of the intervals longer than the run only torch's own is tried: all of them give the same scales.
    intervals = [n for n in INTERVALS if n <= len(gradients) or n == STOCK_INTERVAL]
    tried = [replace(base or ScalerPolicy(), init=scale, interval=n) for scale in INITS for n in intervals]
    scores = sorted(map(scorer.score, tried), key=lambda s: (s.lost, s.skipped, -s.policy.interval))
    close = [s for s in scores if s.lost <= scores[0].lost + TOLERANCE]
    best = min((s.skipped, -s.policy.interval) for s in close)
    equal = [s for s in close if (s.skipped, -s.policy.interval) == best]
    first = sorted(equal, key=lambda s: s.policy.init)[len(equal) // 2]
    return [first, *(s for s in scores if s is not first)]


class _Scorer:
    """Scores policies on one run; caches the flushed shares per scale."""

    def __init__(self, gradients: Sequence[StepGradients]) -> None:
        self._gradients = gradients
        self._limits = np.array([g.limit.estimate for g in gradients])
        self._sampled = np.array([i for i, g in enumerate(gradients) if g.histogram is not None], dtype=np.int64)
        self._sums: dict[float, Floats] = {}

    def score(self, policy: ScalerPolicy) -> PolicyScore:
        """Simulate one policy and total its losses."""
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

    def _running_sums(self, scale: float) -> Floats:
        """Return the running sum of flushed shares over the sampled steps at ``scale``; entry 0 is 0."""
        if scale not in self._sums:
            shares = [self._gradients[i].flushed(scale) for i in self._sampled.tolist()]
            self._sums[scale] = np.concatenate([[0.0], np.cumsum([s.estimate if s else 0.0 for s in shares])])
        return self._sums[scale]
