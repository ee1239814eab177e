"""Which steps get full statistics: every N-th attempt of each optimizer, N fixed or led by what recording costs.

With one optimizer a step is sampled iff ``step % N == 0``. With several (a GAN) the steps of each are counted apart:
``step % 2`` would always be the discriminator's. Which optimizer the coming step belongs to is told from what followed
the last time; steps come in patterns. Where nothing has followed yet, as within each trial of a search, the last one is
expected again, and no more than N steps go by without a sample.

Led by the budget, N stays 1 for the first steps, so that smoke runs are recorded whole, and then moves among the powers
of two: at once up to the smallest N whose cost lies within the budget, and down by one power when half of the budget
would do. Whatever N is, two runs of a script share the steps whose numbers are multiples of both.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any, Final

from precdoctor.recording.options import RecordOptions

#: Attempts of an optimizer recorded in full whatever they cost: 64 steps at twice their time are 1 % of 6400.
WARM_UP: Final = 64
#: Once so many optimizers step no more, new ones have half of that; after twice as many a quarter, and so on: a search
#: makes one for each trial, a meta-learner one for each episode. Behind so many attempts in all new ones have none.
_IN_FULL: Final = 4
_MOST_ATTEMPTS: Final = 64 * WARM_UP
#: Optimizers that may step in turns, one per parameter; where each steps once and is gone, no more seem to go on.
_MOST_ACTIVE: Final = 512
#: N goes no further: what one step in 1024 costs is nothing.
MAX_PERIOD: Final = 1024
#: Block histograms are taken on sampled steps that this divides, and on powers of two.
BLOCK_PERIOD: Final = 64
#: Costs are medians over this many steps: the first steps of a process, evaluations and checkpoints are outliers.
_WINDOW: Final = 16
#: N is halved when that would cost less than this share of the budget; close to 1 it would swing to and fro.
_ROOM: Final = 0.5
#: Sampled steps without a backlog after which N goes half the way back to what ``--every`` said.
_CALM: Final = 4
#: Steps of one optimizer in a row that are told apart; and what is known of who follows whom, at most.
_MAX_STREAK: Final = 64
_MOST_FOLLOWERS: Final = 4096


class Sampler:
    """Decides before each step; learns after each step. Pure counting: it knows no tensors and no clock.

    Attributes:
        period: N.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self.period = options.every or 1
        #: Attempts at the beginning that are all sampled: of the first optimizer, and of each.
        self._warm_up = WARM_UP if options.every is None else 0
        self._warm_ups: dict[str, int] = {}
        #: Per optimizer: attempts so far, and how many of them since the last sampled one.
        self._attempts: dict[str, int] = {}
        self._since: dict[str, int] = {}
        #: Those that still step, in the order of their last attempts, each with the number of that one. An optimizer
        #: steps no more where another one has made two attempts since.
        self._active: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._last_but_one = 0
        #: Steps in all, and since one was sampled, of whatever optimizer.
        self._total = self._idle = 0
        self._last: str | None = None
        self._streak = 0
        self._follower: dict[tuple[str | None, int], str] = {}
        self._costs: dict[bool, collections.deque[int]] = {
            sampled: collections.deque(maxlen=_WINDOW) for sampled in (False, True)
        }
        self._plain: collections.deque[int] = collections.deque(maxlen=_WINDOW)
        #: What steps took as a whole, and what their hooks waited for the device.
        self._steps: dict[bool, collections.deque[int]] = {
            sampled: collections.deque(maxlen=_WINDOW) for sampled in (False, True)
        }
        self._waits: collections.deque[int] = collections.deque(maxlen=_WINDOW)
        #: Sampled steps since the writer was behind last.
        self._calm = 0
        self._had_blocks = False

    def wants(self, step: int) -> bool:
        """Whether the coming step is to be sampled."""
        first, last = self._options.steps
        if (first is not None and step < first) or (last is not None and step >= last):
            return False
        if len(self._attempts) < 2:  # the numbers of steps are those of attempts
            return step - self._options.first_step < self._warm_up or step % self.period == 0
        unknown = (self._last, self._streak) not in self._follower
        return self._is_due(self._expected()) or (unknown and self._idle >= self.period)

    def wants_blocks(self, step: int) -> bool:
        """Whether the coming step, which is sampled, also gets block histograms.

        They cost as much as everything else together, and the spread inside blocks drifts with the weights, not from
        step to step: 0, 1, 2, 4, 8 ... 64, then every 64th, and the first step recorded.
        """
        if len(self._attempts) > 1:
            step = self._options.first_step + self._attempts[self._expected()]
        due = not self._had_blocks or step % BLOCK_PERIOD == 0 or step & (step - 1) == 0
        self._had_blocks = True
        return due

    def _expected(self) -> str:
        """The optimizer of the coming step, as far as is known; one at least has stepped."""
        last = self._last or ""
        return self._follower.get((last, self._streak), last)

    def _is_due(self, optimizer: str) -> bool:
        attempts = self._attempts[optimizer]
        if attempts < self._warm_ups[optimizer] or (self._options.first_step + attempts) % self.period == 0:
            return True
        return self._since[optimizer] >= self.period  # its turn came when another one's step was expected

    def ended(self, optimizer: str, *, sampled: bool, step_ns: int, cost_ns: int, wait_ns: int = 0) -> None:
        """A step has ended.

        Args:
            optimizer: its name; "" without one.
            sampled: whether it was.
            step_ns: what it took, recording included.
            cost_ns: what recording took of the host.
            wait_ns: what its hooks waited for the device.
        """
        if self._last is not None:
            if len(self._follower) >= _MOST_FOLLOWERS:
                self._follower.clear()
            self._follower[self._last, self._streak] = optimizer
        self._streak = min(self._streak + 1, _MAX_STREAK) if optimizer == self._last else 1
        if optimizer != self._last:
            self._change_over(optimizer)
        self._last = optimizer
        self._idle = 1 if sampled else self._idle + 1
        self._total += 1
        self._last_but_one, self._active[optimizer] = self._active.get(optimizer, 0), self._total
        self._attempts[optimizer] = self._attempts.get(optimizer, 0) + 1
        self._since[optimizer] = 1 if sampled else self._since.get(optimizer, 0) + 1
        self._costs[sampled].append(cost_ns)
        self._plain.append(max(step_ns - cost_ns, 1))
        self._steps[sampled].append(step_ns)
        self._waits.append(wait_ns)

    def _change_over(self, optimizer: str) -> None:
        """Another optimizer than the last one has made an attempt."""
        active = self._active
        while active and (next(iter(active.values())) < self._last_but_one or len(active) > _MOST_ACTIVE):
            active.popitem(last=False)
        if optimizer in self._active:
            self._active.move_to_end(optimizer)
        if optimizer not in self._warm_ups:
            over = len(self._warm_ups) - len(self._active)
            self._warm_ups[optimizer] = self._warm_up >> over // _IN_FULL if self._total < _MOST_ATTEMPTS else 0

    def reconsider(self, *, behind: bool) -> dict[str, Any] | None:
        """Move N if there is reason to; to be called after a sampled step.

        Args:
            behind: the log cannot be written as fast as rows are made.

        Returns:
            The data of a ``sampling`` event: ``reason``, ``from``, ``to``, and the expected ``overhead`` in case of a
            budget; null when N stays.
        """
        self._calm = 0 if behind else self._calm + 1
        if behind:
            return self._move(min(self.period * 2, MAX_PERIOD), "backlog")
        if self._options.every is not None:
            back = self.period > self._options.every and self._calm % _CALM == 0
            return self._move(self.period // 2, "caught up") if back else None
        if self._total < _MOST_ATTEMPTS and all(self._attempts[name] < n for name, n in self._warm_ups.items()):
            return None  # another optimizer may be done after a step; each has a warm-up of its own
        budget, period = self._options.budget, self.period
        if self._waits_for_device and not self._steps[False]:
            period = max(period, 2)  # what sampled steps cost the device shows beside one that is not
        while period < MAX_PERIOD and self.overhead(period) > budget:
            period *= 2
        if period == self.period and period > 1 and self.overhead(period // 2) < _ROOM * budget:
            period //= 2
        return self._move(period, "budget")

    def overhead(self, period: int) -> float:
        """Expected cost of recording with this N, as a fraction of the time of the same steps without it."""
        sampled, between = (statistics.median(self._costs[which] or [0]) for which in (True, False))
        if self._waits_for_device and all(self._steps.values()):
            # The host is ahead: what recording takes of it, it would otherwise have waited longer.
            between = max(0.0, between - statistics.median(self._waits))
            longer = statistics.median(self._steps[True]) - statistics.median(self._steps[False])
            sampled = between + max(0.0, longer)
        return (sampled + (period - 1) * between) / period / statistics.median(self._plain or [1])

    @property
    def _waits_for_device(self) -> bool:
        """Whether steps end when the device does, so that they also show what recording costs there."""
        return statistics.median(self._waits or [0]) > 0

    def _move(self, period: int, reason: str) -> dict[str, Any] | None:
        if period == self.period:
            return None
        change: dict[str, Any] = {"reason": reason, "from": self.period, "to": period}
        if reason == "budget":
            change |= {"overhead": round(self.overhead(period), 6), "budget": self._options.budget}
        self.period = period
        return change
