"""PD606's data: the largest logit and the one-hot heads of each softmax over the run, and whether the loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.survey.frames import Ints, firsts, groups, keys, lasts, rows_of, worst_rows
from precdoctor.diagnosis.survey.measures import Floats, column, lists
from precdoctor.diagnosis.survey.rows import Key, text
from precdoctor.diagnosis.survey.view import IDENTITY, RunView, remembered

#: Entropy over the logarithm of the number of keys, below which a head is as good as one-hot. Chosen empirically.
ONE_HOT = 0.05
#: Number of recorded steps at the start of a run, and at most at its end, whose medians are compared. Chosen
#: empirically.
_FIRST, _NEWEST = 4, 8
#: Least number of losses to judge a run by: two per quarter.
_MIN_LOSSES = 8
#: Shares, chosen empirically: what is left of the loss of a run that has learnt, the least fall of a loss that falls,
#: and the lost share of its progress from which a loss stalls.
_LEARNT, _FALL, _LOST = 0.1, 0.1, 0.25
#: Points of a history in the evidence; a plot needs no more.
_SHOWN = 64
_COLUMNS = ("module_class", "shape", "amax", "role", "entropy", "head_max", "head_entropy")


@dataclass(frozen=True, eq=False)
class LogitHistory:
    """The logits of one softmax in training, over the healthy recorded steps.

    Of several rows of one step (ranks) the one with the largest logit counts.

    Attributes:
        steps: ascending, shape ``(steps,)``.
        levels: the largest logit of attention, else the largest magnitude.
        entropies: NaN if unknown.
        one_hot: share of heads whose softmax is as good as one-hot.
        heads: known relative entropies of the heads, an array per step.
    """

    role: str
    module_class: str
    shape: tuple[int, ...]
    steps: Ints
    levels: Floats
    entropies: Floats
    one_hot: Floats
    heads: Sequence[Floats]

    def __len__(self) -> int:
        return int(self.steps.size)

    @property
    def newest(self) -> slice:
        """Slice of the steps at the end of the run: at most eight, and a third of all."""
        return slice(-max(1, min(_NEWEST, len(self) // 3)), None)

    @property
    def first(self) -> float:
        """Median of the largest logit over the first recorded steps."""
        return float(np.median(self.levels[:_FIRST]))

    @property
    def last(self) -> float:
        """Median of the largest logit over the newest recorded steps."""
        return float(np.median(self.levels[self.newest]))

    @property
    def grown(self) -> float:
        """The factor from ``first`` to ``last``; a first logit below one nat counts as one."""
        return self.last / max(1.0, self.first)

    def as_evidence(self) -> list[dict[str, Any]]:
        """Return some points, the last one included, for the evidence of a finding."""
        at = np.arange(len(self))[:: -max(1, math.ceil(len(self) / _SHOWN))][::-1]
        columns = (c[at].tolist() for c in (self.steps, self.levels, self.entropies, self.one_hot))
        return [
            {"step": step, "max_logit": level, "entropy": None if math.isnan(entropy) else entropy, "one_hot": one_hot}
            for step, level, entropy, one_hot in zip(*columns, strict=True)
        ]


@dataclass(frozen=True)
class LossProgress:
    """Whether the loss of a run with sharp softmaxes falls; all False if unknown.

    Attributes:
        learnt: it is at most a tenth of its first value and stays there.
        falls: it fell by at least a tenth over the newer half of the steps.
        stalls: it is not a tenth lower than in its first steps, or has lost a quarter of its progress.
        first, last: medians of its first steps and of its last quarter.
    """

    learnt: bool = False
    falls: bool = False
    stalls: bool = False
    first: float = 0.0
    last: float = 0.0


def loss_progress(view: RunView) -> LossProgress:
    """Judge the first process with enough losses, none of them negative: a negative loss does not measure learning."""
    for steps in view.timeline.values():
        losses = [s.loss for s in steps if s.complete and s.loss is not None and not s.loss_is_bad]
        if len(losses) >= _MIN_LOSSES and min(losses) >= 0.0:
            return _progress(losses)
    return LossProgress()


def _progress(losses: Sequence[float]) -> LossProgress:
    """Judge finite losses, in order, by quarters of the run."""
    size = len(losses) // 4
    quarters = [median(losses[i * size : (i + 1) * size]) for i in range(3)] + [median(losses[-size:])]
    first, last, best = median(losses[:_FIRST]), quarters[-1], min(quarters)
    lost = last - best > _LOST * max(0.0, first - best)
    stalls = last > (1.0 - _FALL) * first or lost
    learnt = last <= _LEARNT * max(first, quarters[0]) and not stalls
    return LossProgress(learnt, falls=last <= (1.0 - _FALL) * quarters[1], stalls=stalls, first=first, last=last)


@remembered
def logit_histories(view: RunView) -> Mapping[Key, LogitHistory]:
    """Return the history of every softmax with a known use, in training, on the healthy recorded steps.

    Logits with NaN or +Inf are left out.
    """
    training = [("phase", "==", "train"), ("nan", "==", 0), ("pos_inf", "==", 0)]
    rows = view.measured((), ("logits",), columns=_COLUMNS, steps=watched_steps(view), where=training)
    rows = rows[rows["role"].map(text, na_action=None).astype(bool) & rows["amax"].notna()]
    largest = np.array([m.max(initial=-math.inf) for m in _finite(rows, "head_max")])
    attention = (rows["role"] == "attention").to_numpy() & (largest > -math.inf)
    level = np.maximum(np.where(attention, largest, rows["amax"]), 0.0)
    heads = _finite(rows, "head_entropy")
    one_hot = np.array([(h < ONE_HOT).sum() / max(1, h.size) for h in heads])
    tensors = groups(rows, IDENTITY)
    first, last = rows.iloc[firsts(tensors)], rows.iloc[lasts(tensors)]
    described = zip(last["role"], first["module_class"].map(text), last["shape"], strict=True)
    worst = worst_rows(groups(rows, (*IDENTITY, "step")), level)
    found = {}
    for key, (role, module_class, shape), mine in zip(
        keys(first), described, rows_of(tensors[worst], rows["step"].to_numpy()[worst]), strict=True
    ):
        at = worst[mine]
        found[key] = LogitHistory(
            *(role, module_class, () if shape is pd.NA else tuple(shape), rows["step"].to_numpy()[at]),
            *(level[at], column(rows, "entropy")[at], one_hot[at], [heads[i] for i in at]),
        )
    return found


def _finite(rows: pd.DataFrame, name: str) -> list[Floats]:
    """Return the finite numbers of a list column, an array per row; heads that saw no key have none."""
    lengths, entries = lists(rows, name)
    return [values[np.isfinite(values)] for values in np.split(entries.astype(np.float64), np.cumsum(lengths)[:-1])]
