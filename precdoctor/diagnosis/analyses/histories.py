"""The amax of each tensor over the run, the healthy steps that rules examine, and robust levels of series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from precdoctor.diagnosis.analyses.healthy_steps import healthy_sampled_steps
from precdoctor.diagnosis.survey.frames import firsts, groups, keys, lasts, rows_of, worst_rows
from precdoctor.diagnosis.survey.measures import column, format_values
from precdoctor.diagnosis.survey.rows import Key, grouped, text
from precdoctor.diagnosis.survey.step_facts import StepFacts, norms_of
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView, remembered
from precdoctor.numerics.formats import Format, format_of_dtype

#: Most steps of a history: this many of the newest, and as many spread over the rest. Bounds the work.
_NEWEST, _SPREAD = 128, 256
#: Number of steps before a step that give the usual norm and learning rate.
_USUAL = 32
#: Most points of a history in the evidence; a plot needs no more.
_SHOWN = 64
_COLUMNS = ("module_class", "phase", "dtype", "numel", "order", "nan", "pos_inf", "at_max", "amax")


@dataclass
class History:
    """The amax of one tensor over the healthy steps on which it held no NaN or +Inf and was not all zero.

    Attributes:
        amax: the largest over all ranks, by step.
        at_max: whether on any step an element equals the dtype's maximum, which masks and clamps cause.
        numel: number of elements on the last step.
        order: execution order on the last step; -1 if unknown.
    """

    dtype: str
    module_class: str
    amax: dict[int, float] = field(default_factory=dict)
    at_max: bool = False
    numel: int = 0
    order: int = -1

    def points(self) -> list[tuple[int, float]]:
        """Return ``(step, amax)``, sorted by step."""
        return sorted(self.amax.items())

    @property
    def fmt(self) -> Format:
        """The floating-point format of the tensor's dtype."""
        return format_of_dtype(self.dtype)

    def as_evidence(self) -> list[dict[str, Any]]:
        """Return the ``history`` entry of a finding's evidence: at most :data:`_SHOWN` points, always with the last."""
        points = self.points()
        kept = points[:: -max(1, math.ceil(len(points) / _SHOWN))][::-1]
        return [{"step": s, "amax": a, "headroom_binades": self.fmt.headroom(a)} for s, a in kept]


@remembered
def forward_histories(view: RunView) -> Mapping[Key, History]:
    """Return the history of every module input and output in a floating-point format of at least 16 bits."""
    rows = view.measured((), ("input", "output"), columns=_COLUMNS, steps=watched_steps(view))
    wide = format_values(rows, "bits") >= 16
    rows = rows[wide & (rows["phase"] != "recompute") & (rows["amax"] > 0.0) & (rows["nan"] + rows["pos_inf"] == 0)]
    one = worst_rows(groups(rows, (*IDENTITY, "step")), rows["amax"])  # by step, the largest over ranks
    ids, step, amax = groups(rows, IDENTITY), rows["step"].to_numpy(), column(rows, "amax")
    first, last = rows.iloc[firsts(ids)], rows.iloc[lasts(ids)]
    described = zip(
        first["dtype"],
        first["module_class"].map(text),
        (
            dict(zip(step[one[own]].tolist(), amax[one[own]].tolist(), strict=True))
            for own in rows_of(ids[one], step[one])
        ),
        (np.bincount(ids, rows["at_max"]) > 0.0).tolist(),
        last["numel"],
        np.nan_to_num(column(last, "order"), nan=-1.0).astype(np.int64).tolist(),
        strict=True,
    )
    return {key: History(*own) for key, own in zip(keys(first), described, strict=True)}


def watched_steps(view: RunView) -> list[int]:
    """Return sampled healthy steps: all of the newest :data:`_NEWEST`, at most :data:`_SPREAD` of the older ones."""
    well = sorted({facts.step for facts in healthy_sampled_steps(view) if facts.complete})
    return thinned(well, _NEWEST, _SPREAD)


def thinned(steps: Sequence[int], newest: int, spread: int) -> list[int]:
    """Return the ``newest`` steps, and at most ``spread`` of the older ones, evenly spread."""
    older = steps[:-newest]
    return [*older[:: max(1, math.ceil(len(older) / spread))], *steps[-newest:]]


def by_optimizer(view: RunView) -> Mapping[tuple[Process, str], Sequence[StepFacts]]:
    """Return the complete steps of each optimizer in order.

    Losses and norms of different optimizers, such as the two of a GAN, cannot be compared.
    """
    timeline = view.timeline.items()
    return grouped(((process, s.optimizer), s) for process, steps in timeline for s in steps if s.complete)


def newer_half(view: RunView, steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return those steps that are in the newer half of the run and of their optimizer's steps; the latter's first."""
    recorded, newer, begins = set(steps), set(), set(steps[:1])
    for own in by_optimizer(view).values():
        if its := [s.step for s in own if s.step in recorded]:
            begins.add(its[0])
            newer |= set(its[len(its) // 2 :])
    return [s for s in steps[len(steps) // 2 :] if s in newer], sorted(begins)


def after_an_ordinary_update(steps: Sequence[StepFacts], i: int) -> bool:
    """Return whether the update before ``steps[i]`` was at most twice the usual gradient norm and learning rate.

    Such an update cannot have damaged the weights: a loss that jumps right after it comes from the batch, or from a
    change of the objective (a new term, another stage). False if too few norms are known.
    """
    before = steps[max(0, i - _USUAL) : i]
    norms = norms_of(before)
    rates = [s.lr for s in before if s.lr]
    if len(norms) < 4 or norms[-1] > 2.0 * median(norms):
        return False
    return not rates or rates[-1] <= 2.0 * median(rates)


def quarter_means(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean of the oldest and of the newest quarter; None for fewer than four values."""
    quarter = len(values) // 4
    return (fmean(values[:quarter]), fmean(values[-quarter:])) if quarter else None


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Return median and robust standard deviation (1.4826 times the median absolute deviation)."""
    known = list(values)
    middle = median(known)
    return middle, 1.4826 * median(abs(v - middle) for v in known)
