"""Rows of two runs side by side: the same tensor on the same step and rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.comparison.renames import Module, translate
from precdoctor.diagnosis.survey.frames import firsts, groups, keys
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import IDENTITY

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows of two frames that belong together, in order of step and rank, then as in the first frame.

    Attributes:
        keys: the tensors, named as in the first run.
        tensor: which of them each pair is of, shape ``(pairs,)``.
        first, second: the rows in the two frames.
    """

    keys: Sequence[Key]
    tensor: Ints
    first: Ints
    second: Ints


def paired(first: pd.DataFrame, second: pd.DataFrame, names: Mapping[Module, Module]) -> Pairs:
    """Pair rows by step, rank, tensor and phase; of several rows the one of the last attempt counts.

    Args:
        first, second: measured frames that have the phase.
        names: modules of ``second`` that go by another name in ``first``.
    """
    known: dict[Key, int] = {}
    phases: dict[str, int] = {}
    tables = []
    for frame, renames in ((first, {}), (second, names)):
        tensors, phase = groups(frame, IDENTITY), groups(frame, ("phase",))
        own = [known.setdefault(translate(k, renames), len(known)) for k in keys(frame.iloc[firsts(tensors)])]
        run_through = [phases.setdefault(str(p), len(phases)) for p in frame["phase"].iloc[firsts(phase)]]
        numbers = {"tensor": np.array(own, np.int64)[tensors], "phase": np.array(run_through, np.int64)[phase]}
        at = {name: frame[name].to_numpy() for name in ("step", "rank", "attempt")}
        tables.append(pd.DataFrame({**at, **numbers, "row": np.arange(len(frame))}))
    identity = ["step", "rank", "tensor", "phase"]
    ours, theirs = (t.sort_values("attempt", kind="stable").drop_duplicates(identity, keep="last") for t in tables)
    pairs = ours.merge(theirs, on=identity, suffixes=("_a", "_b")).sort_values(["step", "rank", "row_a"], kind="stable")
    return Pairs(list(known), *(pairs[name].to_numpy() for name in ("tensor", "row_a", "row_b")))
