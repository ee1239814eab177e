"""How the logits of each softmax went over the run: the largest, and in how many heads the softmax is one-hot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import Key, number, text
from precdoctor.diagnosis.survey.view import RunView

#: Entropy over the logarithm of the number of keys, below which the softmax of a head is as good as one-hot.
ONE_HOT = 0.05
#: Newest recorded steps that speak for the end of a run.
NEWEST = 8
#: Losses without which nothing is said of their course.
_MIN_LOSSES = 8
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "shape"),
    *("nan", "pos_inf", "amax", "role", "entropy", "head_max", "head_entropy"),
)


@dataclass(frozen=True)
class Point:
    """One recorded step: the largest logit (of attention, with its sign; else in magnitude), and of the heads' relative
    entropies all that are known.
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
    """Of one softmax in training, over the healthy recorded steps."""

    role: str
    dtype: str
    module_class: str
    shape: tuple[int, ...] = ()
    _points: dict[int, Point] = field(default_factory=dict)
    _sorted: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Of several ranks the one with the largest logit counts."""
        known = self._points.get(point.step)
        if known is None or point.level > known.level:
            self._points[point.step], self._sorted = point, []

    def points(self) -> Sequence[Point]:
        """By step."""
        self._sorted = self._sorted or [self._points[s] for s in sorted(self._points)]
        return self._sorted

    def newest(self) -> Sequence[Point]:
        """Those that speak for the end: at most a third of all."""
        points = self.points()
        return points[-max(1, min(NEWEST, len(points) // 3)) :]

    @property
    def first(self) -> float:
        """Median of the largest logit over the first four recorded steps."""
        return median(p.level for p in self.points()[:4])

    @property
    def last(self) -> float:
        """The same over the newest."""
        return median(p.level for p in self.newest())

    @property
    def grown(self) -> float:
        """How many times larger it has become; logits below one nat count as one."""
        return self.last / max(1.0, self.first)

    def as_evidence(self, limit: int = 64) -> list[dict[str, Any]]:
        """For a finding, thinned to ``limit`` points, the last kept."""
        points = list(self.points())
        kept = points[::-1][:: max(1, math.ceil(len(points) / limit))][::-1]
        return [{"step": p.step, "max_logit": p.level, "entropy": p.entropy, "one_hot": p.one_hot} for p in kept]


@dataclass(frozen=True)
class LossCourse:
    """What the loss says of a training whose softmaxes became sharp; all false where it says nothing.

    Thresholds chosen empirically; no published source.

    Attributes:
        learnt: it is a tenth of what it was or less, and stays there.
        falls: by a tenth or more over the newer half of the steps.
        stalls: it is not a tenth lower than in its first steps, or has lost a quarter of what it had gained.
    """

    learnt: bool = False
    falls: bool = False
    stalls: bool = False


def loss_course(view: RunView) -> LossCourse:
    """Of the first process that has one. A loss that was zero or less at times is no measure of learning."""
    for steps in view.timeline.values():
        losses = [s.loss for s in steps if s.complete and s.loss is not None and not s.loss_is_bad]
        if len(losses) >= _MIN_LOSSES and min(losses) >= 0.0:
            return _course(losses)
    return LossCourse()


def _course(losses: Sequence[float]) -> LossCourse:
    size = len(losses) // 4
    quarters = [median(losses[i * size : (i + 1) * size]) for i in range(3)] + [median(losses[-size:])]
    first, last = median(losses[:4]), quarters[-1]
    best = min(quarters)
    lost = last - best > 0.25 * max(0.0, first - best)
    stalls = last > 0.9 * first or lost
    return LossCourse(last <= 0.1 * max(first, quarters[0]) and not stalls, last <= 0.9 * quarters[1], stalls)


def logit_histories(view: RunView) -> Mapping[Key, LogitHistory]:
    """Of every softmax whose use is known, in training."""
    return view.remember("logit-histories", lambda: _histories(view))


def _histories(view: RunView) -> dict[Key, LogitHistory]:
    found: dict[Key, LogitHistory] = {}
    for r in view.scan_records(_COLUMNS, ("logits",), steps=watched_steps(view)):
        role, amax = text(r["role"]), number(r["amax"])
        if not role or amax is None or r["phase"] != "train" or r["nan"] or r["pos_inf"]:
            continue
        largest = _finite(r["head_max"])
        level = max(largest, default=amax) if role == "attention" else amax
        key = (str(r["root"]), str(r["module"]), "logits", str(r["name"]), int(r["call"]))
        history = found.setdefault(key, LogitHistory(role, str(r["dtype"]), text(r["module_class"])))
        history.role = role
        history.shape = tuple(map(int, r["shape"])) if r["shape"] is not None else ()
        heads = _finite(r["head_entropy"])
        history.add(Point(int(r["step"]), max(level, 0.0), number(r["entropy"]), heads))
    return found


def _finite(values: Any) -> tuple[float, ...]:
    """A list of numbers as a log holds it, without those of heads that saw no key; null is empty."""
    return () if values is None else tuple(float(v) for v in values if math.isfinite(v))
