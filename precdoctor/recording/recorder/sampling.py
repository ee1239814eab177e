"""Chooses the sampled steps: every N-th attempt of each optimizer. N is ``--every`` or follows the measured cost.

With one optimizer a step is sampled if and only if ``step % N == 0``. With several (a GAN) the attempts of each
optimizer are counted separately: ``step % 2`` would always hit the discriminator. The optimizer of the coming step is
predicted: steps come in patterns, so it is the optimizer that stepped last time after the same history. A history
without a successor, as in each trial of a search, predicts the last optimizer again; then a sample follows at most N
steps after the last.

Under a budget the first steps are all sampled, so that smoke runs are recorded whole. Then N moves among the powers of
two: up to the smallest N whose cost is within the budget, and down by one power if half of the room for samples would
be enough. N is at most an eighth of the steps so far: either half of a run has some eight samples, however short it is.
In short steps, what every step costs leaves little of the budget or nothing. No N would keep it, and the largest would
leave no rule with its data; so samples may cost half as much as that. N doubles while the log cannot be written as fast
as rows are made; the first steps then have longer and longer gaps as well, because rows that had to be dropped would
leave no rule with its data. Whatever N is, two runs of a script share the steps whose numbers are multiples of both.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any, Final

from precdoctor.recording.options import RecordOptions

#: Attempts of an optimizer sampled at any cost: 64 steps at twice their time are 1 % of 6400 steps.
WARM_UP: Final = 64
#: Once this many optimizers have stopped stepping, a new one gets half of the warm-up; after twice as many a quarter,
#: and so on: a search makes an optimizer per trial, a meta-learner per episode. A new one gets none after
#: _MOST_ATTEMPTS attempts in all.
_IN_FULL: Final = 4
_MOST_ATTEMPTS: Final = 64 * WARM_UP
#: Most optimizers that count as still stepping (one per parameter) at once.
_MOST_ACTIVE: Final = 512
#: Largest N: the cost of one step in 1024 is negligible.
MAX_PERIOD: Final = 1024
#: Block histograms are recorded on sampled steps that this number divides, and on powers of two.
BLOCK_PERIOD: Final = 64
#: Costs are medians over this many steps, because the first steps, evaluations and checkpoints are outliers.
_WINDOW: Final = 16
#: N is halved if samples would then take less than this share of their room; with a share near 1, N would oscillate.
_ROOM: Final = 0.5
#: Samples may cost this share of what all steps cost, whatever the budget.
_BESIDE: Final = 0.5
#: N is at most the number of steps so far divided by this, which is also about the number of samples in either half of
#: a run. Rules take medians over that many; twice as many would double what short runs cost behind their first steps.
_SHARE_OF_RUN: Final = 8
#: After this many sampled steps without a backlog N is halved, until it is back at ``--every``.
_CALM: Final = 4
#: Longest streak of one optimizer that the prediction counts, and most histories that it remembers.
_MAX_STREAK: Final = 64
_MOST_FOLLOWERS: Final = 4096


class Sampler:
    """Decides before each step whether it is sampled, from counts and costs. Reads no tensor and no clock.

    Attributes:
        period: N.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self.period = options.every or 1
        #: Attempts at the beginning that are all sampled: of the first optimizer, and per optimizer.
        self._warm_up = WARM_UP if options.every is None else 0
        self._warm_ups: dict[str, int] = {}
        #: Per optimizer: attempts so far, and attempts since its last sampled one.
        self._attempts: dict[str, int] = {}
        self._since_sampled: dict[str, int] = {}
        #: Optimizers that still step, in the order of their last attempts, each with the number of that attempt. An
        #: optimizer has stopped stepping if another one has made two attempts since.
        self._active: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._previous_attempt = 0
        #: Number of steps in all, and since the last sampled one, of any optimizer.
        self._total_steps = self._steps_since_sample = 0
        self._last_optimizer: str | None = None
        self._streak = 0
        self._next_optimizer: dict[tuple[str | None, int], str] = {}
        self._costs: dict[bool, collections.deque[int]] = {
            sampled: collections.deque(maxlen=_WINDOW) for sampled in (False, True)
        }
        self._unrecorded_times: collections.deque[int] = collections.deque(maxlen=_WINDOW)
        #: Durations of whole steps, and of the waits of their hooks for the device.
        self._step_times: dict[bool, collections.deque[int]] = {
            sampled: collections.deque(maxlen=_WINDOW) for sampled in (False, True)
        }
        self._wait_times: collections.deque[int] = collections.deque(maxlen=_WINDOW)
        #: Number of sampled steps since the writer was last behind.
        self._calm = 0
        #: Least distance of sampled steps in a warm-up, while the writer is behind; else 0.
        self._gap = 0
        self._had_blocks = False

    def wants(self, step: int) -> bool:
        """Return whether the coming step is to be sampled."""
        first, last = self._options.steps
        if (first is not None and step < first) or (last is not None and step >= last):
            return False
        if len(self._attempts) < 2:  # with one optimizer, step numbers are its attempt numbers
            warm_up = step - self._options.first_step < self._warm_up and self._steps_since_sample >= self._gap
            return warm_up or step % self.period == 0
        unknown = (self._last_optimizer, self._streak) not in self._next_optimizer
        return self._is_due(self._expected()) or (unknown and self._steps_since_sample >= self.period)

    def wants_blocks(self, step: int) -> bool:
        """Return whether the coming step, which is sampled, also gets block histograms.

        They cost as much as everything else together, and the spread inside blocks drifts slowly with the weights. So
        they are recorded on steps 0, 1, 2, 4, 8 ... 64, then on every 64th, and on the first recorded step.
        """
        if len(self._attempts) > 1:
            step = self._options.first_step + self._attempts[self._expected()]
        due = not self._had_blocks or step % BLOCK_PERIOD == 0 or step & (step - 1) == 0
        self._had_blocks = True
        return due

    def _expected(self) -> str:
        """Return the predicted optimizer of the coming step. At least one must have stepped."""
        last = self._last_optimizer or ""
        return self._next_optimizer.get((last, self._streak), last)

    def _is_due(self, optimizer: str) -> bool:
        attempts = self._attempts[optimizer]
        warm_up = attempts < self._warm_ups[optimizer] and self._steps_since_sample >= self._gap
        if warm_up or (self._options.first_step + attempts) % self.period == 0:
            return True
        return self._since_sampled[optimizer] >= self.period  # at its multiple of N another one was predicted

    def ended(self, optimizer: str, *, sampled: bool, step_ns: int, cost_ns: int, wait_ns: int = 0) -> None:
        """Note that a step has ended.

        Args:
            optimizer: its name; the root's in an inference run; "" if the step has neither.
            sampled: whether the step was sampled.
            step_ns: duration of the step, recording included.
            cost_ns: host time of recording.
            wait_ns: time that its hooks waited for the device.
        """
        if self._last_optimizer is not None:
            if len(self._next_optimizer) >= _MOST_FOLLOWERS:
                self._next_optimizer.clear()
            self._next_optimizer[self._last_optimizer, self._streak] = optimizer
        self._streak = min(self._streak + 1, _MAX_STREAK) if optimizer == self._last_optimizer else 1
        if optimizer != self._last_optimizer:
            self._change_over(optimizer)
        self._last_optimizer = optimizer
        self._steps_since_sample = 1 if sampled else self._steps_since_sample + 1
        self._total_steps += 1
        self._previous_attempt, self._active[optimizer] = self._active.get(optimizer, 0), self._total_steps
        self._attempts[optimizer] = self._attempts.get(optimizer, 0) + 1
        self._since_sampled[optimizer] = 1 if sampled else self._since_sampled.get(optimizer, 0) + 1
        self._costs[sampled].append(cost_ns)
        self._unrecorded_times.append(max(step_ns - cost_ns, 1))
        self._step_times[sampled].append(step_ns)
        self._wait_times.append(wait_ns)

    def _change_over(self, optimizer: str) -> None:
        """Update which optimizers still step as another one makes an attempt; give a new one its warm-up."""
        active = self._active
        while active and (next(iter(active.values())) < self._previous_attempt or len(active) > _MOST_ACTIVE):
            active.popitem(last=False)
        if optimizer in self._active:
            self._active.move_to_end(optimizer)
        if optimizer not in self._warm_ups:
            over = len(self._warm_ups) - len(self._active)
            self._warm_ups[optimizer] = self._warm_up >> over // _IN_FULL if self._total_steps < _MOST_ATTEMPTS else 0

    def reconsider(self, *, behind: bool) -> dict[str, Any] | None:
        """Change N if there is reason to. Call it after a sampled step.

        Args:
            behind: rows are made faster than they can be written.

        Returns:
            The data of a ``sampling`` event; None if N stays. ``overhead`` is the expected cost at the new N.
        """
        self._calm = 0 if behind else self._calm + 1
        self._gap = min(max(2, 2 * self._gap), MAX_PERIOD) if behind else 0
        if behind:
            return self._move(min(self.period * 2, MAX_PERIOD), "backlog")
        if self._options.every is not None:
            back = self.period > self._options.every and self._calm % _CALM == 0
            return self._move(self.period // 2, "caught up") if back else None
        if self._total_steps < _MOST_ATTEMPTS and all(self._attempts[name] < n for name, n in self._warm_ups.items()):
            return None  # every optimizer is still in its warm-up, which N does not change
        period, (fixed, more) = self.period, self._cost()
        room = max(self._options.budget - fixed, _BESIDE * fixed)
        if self._waits_for_device and not self._step_times[False]:
            period = max(period, 2)  # the cost on the device can only be measured against a step that is not sampled
        most = min(MAX_PERIOD, self._total_steps // _SHARE_OF_RUN)
        while 2 * period <= most and more > room * period:
            period *= 2
        if period == self.period and period > 1 and more < _ROOM * room * (period // 2):
            period //= 2
        return self._move(period, "budget")

    def overhead(self, period: int) -> float:
        """Return the expected cost of recording at this N, as a fraction of the time of the steps without recording."""
        fixed, more = self._cost()
        return fixed + more / period

    def _cost(self) -> tuple[float, float]:
        """Return what every step costs and what a sampled one costs beyond that, as fractions of such a step's time."""
        sampled, between = (statistics.median(self._costs[which] or [0]) for which in (True, False))
        if self._waits_for_device and all(self._step_times.values()):
            # The host is ahead of the device: without recording it would have waited for that much longer.
            between = max(0.0, between - statistics.median(self._wait_times))
            longer = statistics.median(self._step_times[True]) - statistics.median(self._step_times[False])
            sampled = between + max(0.0, longer)
        step = statistics.median(self._unrecorded_times or [1])
        return between / step, max(0.0, sampled - between) / step

    @property
    def _waits_for_device(self) -> bool:
        """Whether hooks wait for the device, so that a step's duration includes the cost of recording there."""
        return statistics.median(self._wait_times or [0]) > 0

    def _move(self, period: int, reason: str) -> dict[str, Any] | None:
        """Change N and return the data of the event; None if N stays."""
        if period == self.period:
            return None
        change: dict[str, Any] = {"reason": reason, "from": self.period, "to": period}
        if reason == "budget":
            change |= {"overhead": round(self.overhead(period), 6), "budget": self._options.budget}
        self.period = period
        return change
