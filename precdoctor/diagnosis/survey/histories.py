"""How the largest magnitude of each tensor went over the run, and robust levels of such series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.rows import Key, integer, known_format, number, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Steps a history holds at most: these many of the newest, and as many spread over the rest.
_NEWEST, _SPREAD = 128, 256
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "numel", "order"),
    *("nan", "pos_inf", "neg_inf", "at_max", "amax"),
)


@dataclass
class History:
    """The amax of one tensor by step, largest over ranks, on healthy steps where it was finite and not zero."""

    dtype: str
    module_class: str
    amax: dict[int, float] = field(default_factory=dict)
    #: On some step an element was exactly at the dtype's maximum, as masks and clamps put it there.
    at_max: bool = False
    #: Elements, and place in the execution order, on the last step read.
    numel: int = 0
    order: int = -1

    def points(self) -> list[tuple[int, float]]:
        """``(step, amax)`` by step."""
        return sorted(self.amax.items())

    def headroom(self, amax: float) -> float:
        """Binades between ``amax`` and the dtype's maximum."""
        fmt = known_format(self.dtype)
        return fmt.headroom(amax) if fmt is not None else math.inf

    def as_evidence(self, limit: int = 64) -> list[dict[str, Any]]:
        """The fixed-shape ``history`` entry of a finding's evidence, thinned to ``limit`` points, the last kept."""
        points = self.points()
        stride = max(1, math.ceil(len(points) / limit))
        kept = points[::-1][::stride][::-1]
        return [{"step": s, "amax": a, "headroom_binades": self.headroom(a)} for s, a in kept]


def forward_histories(view: RunView) -> Mapping[Key, History]:
    """Of every input and output of a module in training, in a floating-point format of 16 bits or more."""
    return view.remember("forward-histories", lambda: _histories(view, ("input", "output")))


def _histories(view: RunView, kinds: Sequence[str]) -> dict[Key, History]:
    found: dict[Key, History] = {}
    for r in view.scan_records(_COLUMNS, kinds, steps=watched_steps(view)):
        if str(r["dtype"]).startswith("float8") or r["phase"] == "recompute":
            continue
        amax = number(r["amax"])
        if not amax or r["nan"] or r["pos_inf"] or known_format(str(r["dtype"])) is None:
            continue
        key = (str(r["root"]), str(r["module"]), str(r["kind"]), str(r["name"]), int(r["call"]))
        history = found.setdefault(key, History(str(r["dtype"]), text(r["module_class"])))
        step = int(r["step"])
        history.amax[step] = max(history.amax.get(step, 0.0), amax)
        history.at_max |= bool(r["at_max"])
        history.numel, history.order = int(r["numel"]), -1 if (order := integer(r["order"])) is None else order
    return found


def watched_steps(view: RunView) -> list[int]:
    """Sampled healthy steps: the newest ones all, the older ones thinned."""
    well = sorted(
        {
            facts.step
            for process, steps in view.timeline.items()
            for facts in steps
            if facts.sampled and facts.complete and is_well(view, process, facts)
        }
    )
    older, newest = well[:-_NEWEST], well[-_NEWEST:]
    return [*older[:: max(1, math.ceil(len(older) / _SPREAD))], *newest]


def by_optimizer(view: RunView) -> Mapping[tuple[Process, str], Sequence[StepFacts]]:
    """The complete steps of each optimizer in order: of a GAN's two, losses and norms have nothing to do with each
    other.
    """
    found: dict[tuple[Process, str], list[StepFacts]] = {}
    for process, steps in view.timeline.items():
        for facts in steps:
            if facts.complete:
                found.setdefault((process, facts.optimizer), []).append(facts)
    return found


def after_an_ordinary_update(steps: Sequence[StepFacts], i: int, *, window: int = 32) -> bool:
    """Whether the update before step ``i`` was of the usual size, at the usual rate.

    Such an update cannot have thrown the weights away: a loss that jumps right behind it comes from the batch, or from
    an objective that was changed there (a term switched on, another stage). False when no norm is known.
    """
    norms = [s.grad_norm for s in steps[max(0, i - window) : i] if s.grad_norm is not None]
    rates = [s.lr for s in steps[max(0, i - window) : i] if s.lr]
    if len(norms) < 4 or norms[-1] > 2.0 * median(norms):
        return False
    return not rates or rates[-1] <= 2.0 * median(rates)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and robust standard deviation (1.4826 times the median absolute deviation)."""
    known = list(values)
    middle = median(known)
    return middle, 1.4826 * median(abs(v - middle) for v in known)
