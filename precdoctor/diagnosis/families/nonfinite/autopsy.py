"""Chooses the steps that a second run of a recorded command traces, and checks that it repeats the first run.

``precdoctor autopsy RUN`` makes the second run and writes it to ``RUN/autopsy``, a run directory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.survey.run_facts import table_columns
from precdoctor.diagnosis.survey.view import RunView

#: Maximum number of steps to trace if only an interval is known; a traced step takes four to five times as long.
MAX_TRACED = 64
#: The columns that identify a tensor within a step.
_NAME_COLUMNS = ("root", "module", "kind", "name", "call", "phase")
_TENSOR_COLUMNS = ["step", "rank", *_NAME_COLUMNS]


def plan(view: RunView, *, died: bool = True) -> range | None:
    """Return the steps to trace; None if the run has no incident.

    That is the first incident's step alone, unless it is about weights (PD105) or begins with a tensor from before the
    step: then tracing begins after the last finite step, and covers at most ``MAX_TRACED`` steps.

    Args:
        died: without an incident, trace an incomplete last step: a loop that checks its loss ends there.
    """
    found = incidents(view)
    if not found:
        ends = [t[-1] for t in view.timeline.values() if t and not t[-1].complete]
        return range(ends[0].step, ends[0].step + 1) if ends and died else None
    incident = found[0]
    culprit = incident.culprit
    has_own_origin = culprit is not None and culprit.external is None
    if incident.code != "PD105" and (has_own_origin or culprit is None):
        return range(incident.step, incident.step + 1)
    first = incident.last_finite + 1 if incident.last_finite is not None else 0
    return range(max(first, incident.step + 1 - MAX_TRACED, 0), incident.step + 1)


@dataclass(frozen=True)
class Agreement:
    """The comparison of two runs, bit for bit: the number of losses and of tensor fingerprints that both recorded."""

    steps: int
    tensors: int
    #: The first step at which they differ; None if they are equal.
    differs_at: int | None

    @property
    def same(self) -> bool:
        """Whether both recorded something, and all of it is equal."""
        return self.differs_at is None and self.steps + self.tensors > 0


def agreement(first: RunView, again: RunView, until: int) -> Agreement:
    """Compare two runs up to and including step ``until``: all losses, and the fingerprints that both recorded."""
    keys = ["rank", "step", "optimizer"]
    frames = [v.steps.loc[v.steps["step"] <= until, [*keys, "loss"]].astype({"optimizer": str}) for v in (first, again)]
    losses = frames[0].merge(frames[1], on=keys, suffixes=("_a", "_b"))
    differ = losses[~_equal_losses(losses["loss_a"], losses["loss_b"])]["step"]
    tensors = _fingerprints(first, until).join(
        _fingerprints(again, until), _TENSOR_COLUMNS, join_type="inner", right_suffix="_again"
    )
    differing = tensors.filter(pc.not_equal(tensors["fingerprint"], tensors["fingerprint_again"]))["step"]
    steps = [int(s) for s in (*differ, *differing.to_pylist())]
    return Agreement(len(losses), tensors.num_rows, min(steps, default=None))


def _fingerprints(view: RunView, until: int) -> pa.Table:
    """The fingerprints of weights, outputs and weight gradients up to step ``until``, with ``_TENSOR_COLUMNS``."""
    kinds, where = ("weight", "output", "weight_grad"), [("step", "<=", until)]
    batches = view.batches([*_TENSOR_COLUMNS, "fingerprint"], kinds, where=where)
    table = pa.Table.from_batches(
        batches, table_columns("tensors", ["step", "rank", "attempt", *_NAME_COLUMNS, "fingerprint"])
    )
    for name in ("root", "module", "kind", "name", "phase"):
        text = pc.fill_null(table[name].cast(pa.string()), "")
        table = table.set_column(table.column_names.index(name), name, text)
    return table.drop_columns(["attempt"]).filter(pc.is_valid(table["fingerprint"]))


def _equal_losses(a: pd.Series, b: pd.Series) -> np.ndarray:
    left, right = a.to_numpy(dtype=float, na_value=np.nan), b.to_numpy(dtype=float, na_value=np.nan)
    return np.asarray((left == right) | (np.isnan(left) & np.isnan(right)))
