"""The columns of an inference run's groups of elements, made on the drain thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from precdoctor.numerics.group_prediction import GROUPINGS, LIMIT
from precdoctor.recording.slots.slot_table import Entry
from precdoctor.runlog import arrays


def group_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    """The columns ``<grouping>_hist`` and ``<grouping>_energy`` of a step's rows; none where nothing was measured."""
    measured = [(row, entry.groups) for row, entry in enumerate(entries) if entry.groups]
    found: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.float64]]] = {}
    for row, several in measured:
        for one in several:
            numbers = np.array(one.numbers()).reshape(len(one.groupings), 2, LIMIT)
            for name, sums in zip(one.groupings, numbers, strict=True):
                found[name, row] = found.get((name, row), 0.0) + sums
    columns = {}
    for name in GROUPINGS:
        rows = [row for grouping, row in found if grouping == name]
        if not rows:
            continue
        lengths, known = np.zeros(len(entries), np.int64), np.zeros(len(entries), np.bool_)
        for row in rows:
            used = np.flatnonzero(found[name, row][0])
            lengths[row], known[row] = used[-1] + 1 if used.size else 0, True
        for part, ending, dtype in ((0, "hist", np.int64), (1, "energy", np.float64)):
            values = np.concatenate([found[name, row][part, : lengths[row]] for row in sorted(rows)])
            columns[f"{name}_{ending}"] = arrays.lists(lengths, arrays.numbers(values.astype(dtype)), known)
    return columns
