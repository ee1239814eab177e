"""PD606's data: the largest logit and the one-hot heads of each softmax over the run, and the course of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import Key, key_of, number, text
from precdoctor.diagnosis.survey.view import RunView

#: Entropy over the logarithm of the number of keys, below which a head is as good as one-hot. Chosen empirically.
ONE_HOT = 0.05
#: Recorded steps at the start of a run, and most of those at its end, whose median is compared. Chosen empirically.
_FIRST, _NEWEST = 4, 8
#: Fewest losses for a course: two per quarter.
_MIN_LOSSES = 8
#: Shares of a loss, chosen empirically: it has learnt if a tenth is left, it falls by a tenth, it has lost a quarter.
_LEARNT, _FALL, _LOST = 0.1, 0.1, 0.25
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "shape"),
    *("nan", "pos_inf", "amax", "role", "entropy", "head_max", "head_entropy"),
)


@dataclass(frozen=True)
class Point:
    """One recorded step.

    Attributes:
        level: the largest logit of attention, else the largest magnitude.
        heads: known relative entropies of the heads.
    """

    step: int
    level: float
    entropy: float | None
    heads: tuple[float, ...]

    @property
    def one_hot(self) -> float:
        """Share of heads whose softmax is as good as one-hot."""
        return sum(h < ONE_HOT for h in self.heads) / len(self.heads) if self.heads else 0.0


@dataclass
class LogitHistory:
    """The logits of one softmax in training, over the healthy recorded steps."""

    role: str
    dtype: str
    module_class: str
    shape: tuple[int, ...] = ()
    _points: dict[int, Point] = field(default_factory=dict)
    _sorted: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Adds a point; of several ranks the one with the largest logit counts."""
        known = self._points.get(point.step)
        if known is None or point.level > known.level:
            self._points[point.step], self._sorted = point, []

    def points(self) -> Sequence[Point]:
        """The points by step."""
        self._sorted = self._sorted or [self._points[s] for s in sorted(self._points)]
        return self._sorted

    def newest(self) -> Sequence[Point]:
        """The points at the end of the run: at most a third of all."""
        points = self.points()
        return points[-max(1, min(_NEWEST, len(points) // 3)) :]

    @property
    def first(self) -> float:
        """Median of the largest logit over the first recorded steps."""
        return median(p.level for p in self.points()[:_FIRST])

    @property
    def last(self) -> float:
        """Median of the largest logit over the newest recorded steps."""
        return median(p.level for p in self.newest())

    @property
    def grown(self) -> float:
        """The factor from ``first`` to ``last``; logits below one nat count as one."""
        return self.last / max(1.0, self.first)

    def as_evidence(self, limit: int = 64) -> list[dict[str, Any]]:
        """For a finding, thinned to ``limit`` points including the last."""
        points = list(self.points())
        thinned = points[::-1][:: max(1, math.ceil(len(points) / limit))][::-1]
        return [{"step": p.step, "max_logit": p.level, "entropy": p.entropy, "one_hot": p.one_hot} for p in thinned]


@dataclass(frozen=True)
class LossCourse:
    """The course of the loss of a run with sharp softmaxes; all false if unknown.

    Attributes:
        learnt: it is at most a tenth of its first value and stays there.
        falls: it fell by at least a tenth over the newer half of the steps.
        stalls: it is not a tenth lower than in its first steps, or has lost a quarter of its progress.
    """

    learnt: bool = False
    falls: bool = False
    stalls: bool = False


def loss_course(view: RunView) -> LossCourse:
    """The course of the first process with losses. A loss that was below zero at times is no measure of learning."""
    for steps in view.timeline.values():
        losses = [s.loss for s in steps if s.complete and s.loss is not None and not s.loss_is_bad]
        if len(losses) >= _MIN_LOSSES and min(losses) >= 0.0:
            return _course(losses)
    return LossCourse()


def _course(losses: Sequence[float]) -> LossCourse:
    size = len(losses) // 4
    quarters = [median(losses[i * size : (i + 1) * size]) for i in range(3)] + [median(losses[-size:])]
    first, last, best = median(losses[:_FIRST]), quarters[-1], min(quarters)
    lost = last - best > _LOST * max(0.0, first - best)
    stalls = last > (1.0 - _FALL) * first or lost
    learnt = last <= _LEARNT * max(first, quarters[0]) and not stalls
    return LossCourse(learnt, falls=last <= (1.0 - _FALL) * quarters[1], stalls=stalls)


def logit_histories(view: RunView) -> Mapping[Key, LogitHistory]:
    """The history of every softmax with a known use, in training."""
    return view.remember("logit-histories", lambda: _histories(view))


def _histories(view: RunView) -> dict[Key, LogitHistory]:
    found: dict[Key, LogitHistory] = {}
    for r in view.scan_records(_COLUMNS, ("logits",), steps=watched_steps(view)):
        role, amax = text(r["role"]), number(r["amax"])
        if not role or amax is None or r["phase"] != "train" or r["nan"] or r["pos_inf"]:
            continue
        largest = _finite(r["head_max"])
        level = max(largest, default=amax) if role == "attention" else amax
        history = found.setdefault(key_of(r), LogitHistory(role, str(r["dtype"]), text(r["module_class"])))
        history.role = role
        history.shape = tuple(map(int, r["shape"])) if r["shape"] is not None else ()
        heads = _finite(r["head_entropy"])
        history.add(Point(int(r["step"]), max(level, 0.0), number(r["entropy"]), heads))
    return found


def _finite(values: Any) -> tuple[float, ...]:
    """A list of numbers of the log without those of heads that saw no key; null is empty."""
    return () if values is None else tuple(float(v) for v in values if math.isfinite(v))
