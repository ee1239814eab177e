"""The amax of each tensor over the run, the healthy steps that rules examine, and robust levels of series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.frames import firsts, groups, keys, lasts, rows_of
from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.measures import column, format_values
from precdoctor.diagnosis.survey.rows import Key, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.formats import Format, format_of_dtype

#: Most steps of a history: of the newest, and spread over the rest. They bound the work.
_NEWEST, _SPREAD = 128, 256
#: Steps before one, which say what is usual there.
_USUAL = 32
#: Points of a history in the evidence; a plot needs no more.
_SHOWN = 64
_COLUMNS = ("module_class", "phase", "dtype", "numel", "order", "nan", "pos_inf", "at_max", "amax")


@dataclass
class History:
    """One tensor over the healthy steps where it was finite and not zero.

    Attributes:
        amax: largest magnitude by step, over all ranks.
        at_max: on some step an element equals the dtype's maximum, as masks and clamps make it.
        numel, order: elements, and place in the execution order, on the last step.
    """

    dtype: str
    module_class: str
    amax: dict[int, float] = field(default_factory=dict)
    at_max: bool = False
    numel: int = 0
    order: int = -1

    def points(self) -> list[tuple[int, float]]:
        """``(step, amax)`` by step."""
        return sorted(self.amax.items())

    @property
    def fmt(self) -> Format:
        """Its format."""
        return format_of_dtype(self.dtype)

    def as_evidence(self) -> list[dict[str, Any]]:
        """The fixed-shape ``history`` entry of a finding's evidence, of some points including the last."""
        points = self.points()
        kept = points[:: -max(1, math.ceil(len(points) / _SHOWN))][::-1]
        return [{"step": s, "amax": a, "headroom_binades": self.fmt.headroom(a)} for s, a in kept]


def forward_histories(view: RunView) -> Mapping[Key, History]:
    """The history of every module input and output in training, in a floating-point format of at least 16 bits."""
    return view.remember("forward-histories", lambda: _forward_histories(view))


def _forward_histories(view: RunView) -> dict[Key, History]:
    rows = view.measured((), ("input", "output"), columns=_COLUMNS, steps=watched_steps(view))
    wide = format_values(rows, "bits") >= 16
    rows = rows[wide & (rows["phase"] != "recompute") & (rows["amax"] > 0.0) & (rows["nan"] + rows["pos_inf"] == 0)]
    order = np.lexsort((-rows["amax"], rows["step"]))
    one = order[firsts(groups(rows.iloc[order], (*IDENTITY, "step")))]  # by step, the largest over ranks
    ids, step, amax = groups(rows, IDENTITY), rows["step"].to_numpy(), column(rows, "amax")
    first, last = rows.iloc[firsts(ids)], rows.iloc[lasts(ids)]
    described = zip(
        first["dtype"],
        first["module_class"].map(text),
        (dict(zip(step[one[own]].tolist(), amax[one[own]].tolist(), strict=True)) for own in rows_of(ids[one])),
        (np.bincount(ids, rows["at_max"]) > 0.0).tolist(),
        last["numel"],
        np.nan_to_num(column(last, "order"), nan=-1.0).astype(np.int64).tolist(),
        strict=True,
    )
    return {key: History(*own) for key, own in zip(keys(first), described, strict=True)}


def watched_steps(view: RunView) -> list[int]:
    """Sampled healthy steps: all of the newest, the older ones thinned."""
    well = sorted(
        {
            facts.step
            for process, steps in view.timeline.items()
            for facts in steps
            if facts.sampled and facts.complete and view.survey.covers([facts.step]) and is_well(view, process, facts)
        }
    )
    older, newest = well[:-_NEWEST], well[-_NEWEST:]
    return [*older[:: max(1, math.ceil(len(older) / _SPREAD))], *newest]


def by_optimizer(view: RunView) -> Mapping[tuple[Process, str], Sequence[StepFacts]]:
    """The complete steps of each optimizer in order: losses and norms of a GAN's two optimizers are not comparable."""
    found: dict[tuple[Process, str], list[StepFacts]] = {}
    for process, steps in view.timeline.items():
        for facts in steps:
            if facts.complete:
                found.setdefault((process, facts.optimizer), []).append(facts)
    return found


def after_an_ordinary_update(steps: Sequence[StepFacts], i: int) -> bool:
    """Whether the update before step ``i`` was of the usual size, at the usual rate.

    Such an update cannot have damaged the weights: a loss that jumps right after it comes from the batch, or from an
    objective that changed there (a term switched on, another stage). False if too few norms are known.
    """
    before = steps[max(0, i - _USUAL) : i]
    norms = [s.grad_norm for s in before if s.grad_norm is not None]
    rates = [s.lr for s in before if s.lr]
    if len(norms) < 4 or norms[-1] > 2.0 * median(norms):
        return False
    return not rates or rates[-1] <= 2.0 * median(rates)


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Median and robust standard deviation (1.4826 times the median absolute deviation)."""
    known = list(values)
    middle = median(known)
    return middle, 1.4826 * median(abs(v - middle) for v in known)
