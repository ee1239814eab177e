"""The second run of a recorded command: which steps to trace, and whether it repeats the first.

``precdoctor autopsy RUN`` writes it to ``RUN/autopsy``, a run directory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.survey.view import RunView

#: Most steps to trace if only an interval is known; a traced step takes four to five times as long.
MAX_TRACED = 64


@dataclass(frozen=True)
class Plan:
    """The steps ``[first, last)`` to trace."""

    first: int
    last: int


def plan(view: RunView, *, died: bool = True) -> Plan | None:
    """The steps to trace; None if no step of the run became non-finite.

    Args:
        view: the first run.
        died: an incomplete last step counts: loops that check their loss end before ``backward``.
    """
    found = incidents(view)
    if not found:
        ends = [t[-1] for t in view.timeline.values() if t and not t[-1].complete]
        return Plan(ends[0].step, ends[0].step + 1) if ends and died else None
    incident = found[0]
    culprit = incident.culprit
    known = culprit is not None and culprit.external is None
    if incident.code != "PD105" and (known or culprit is None):
        return Plan(incident.step, incident.step + 1)
    first = incident.last_finite + 1 if incident.last_finite is not None else 0
    return Plan(max(first, incident.step + 1 - MAX_TRACED, 0), incident.step + 1)


@dataclass(frozen=True)
class Agreement:
    """How far two runs are equal bit for bit: the number of losses and of fingerprints that both recorded."""

    steps: int
    tensors: int
    #: The first step at which they differ; None if they are equal.
    differs_at: int | None

    @property
    def same(self) -> bool:
        """Whether both recorded something, and all of it is equal."""
        return self.differs_at is None and self.steps + self.tensors > 0


def agreement(first: RunView, again: RunView, until: int) -> Agreement:
    """Compare two runs up to and including step ``until``."""
    keys = ["rank", "step", "optimizer"]
    frames = [v.run.steps(columns=[*keys, "loss"], filters=[("step", "<=", until)]) for v in (first, again)]
    losses = frames[0].merge(frames[1], on=keys, suffixes=("_a", "_b"))
    differ = losses[~_equal(losses["loss_a"], losses["loss_b"])]["step"]
    keys = ["rank", "step", "root", "module", "kind", "name", "call", "phase"]
    kinds = ["weight", "output", "weight_grad"]
    tables = [
        v.run.tensors(columns=[*keys, "fingerprint"], filters=[("step", "<=", until), ("kind", "in", kinds)])
        .dropna(subset=["fingerprint"])
        .astype({k: str for k in keys[2:] if k != "call"})
        for v in (first, again)
    ]
    tensors = tables[0].merge(tables[1], on=keys, suffixes=("_a", "_b"))
    other = tensors[tensors["fingerprint_a"] != tensors["fingerprint_b"]]["step"]
    steps = [int(s) for s in (*differ, *other)]
    return Agreement(len(losses), len(tensors), min(steps, default=None))


def _equal(a: pd.Series, b: pd.Series) -> np.ndarray:
    left, right = a.to_numpy(dtype=float, na_value=np.nan), b.to_numpy(dtype=float, na_value=np.nan)
    return np.asarray((left == right) | (np.isnan(left) & np.isnan(right)))
