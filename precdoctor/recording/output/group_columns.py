"""Columns that only some rows have, computed on the drain thread: groups of elements of inference runs, and logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from precdoctor.numerics.group_prediction import GROUPINGS, LIMIT
from precdoctor.recording.slots.logit_sample import Sharpness
from precdoctor.recording.slots.slot_table import Entry
from precdoctor.runlog import arrays


def group_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the columns ``<grouping>_hist`` and ``<grouping>_energy`` of a step; empty if nothing was measured."""
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


def sharpness_columns(rows: int, logits: Sequence[tuple[int, Sharpness]]) -> dict[str, Any]:
    """Return the role of each softmax, its entropy, and the largest logit and the relative entropy of each head.

    Args:
        rows: number of rows of a step.
        logits: index and facts of each row of logits; if empty, there are no columns.
    """
    if not logits:
        return {}
    roles: list[str | None] = [None] * rows
    entropy, known = np.full(rows, math.nan), np.zeros(rows, np.bool_)
    sizes, numbers = np.zeros(rows, np.int64), {}
    for row, sharpness in logits:
        values = sharpness.numbers()
        roles[row], entropy[row], numbers[row] = sharpness.role or None, values[0], values[1:]
        known[row], sizes[row] = True, sharpness.heads
    some = sizes > 0
    largest = [v for row, _ in logits for v in numbers[row][: sizes[row]]]
    relative = [v for row, _ in logits for v in numbers[row][sizes[row] :]]
    return {
        "role": arrays.strings(roles),
        "entropy": arrays.numbers(entropy, known),
        "head_max": arrays.lists(sizes, arrays.numbers(np.array(largest)), some),
        "head_entropy": arrays.lists(sizes, arrays.numbers(np.array(relative)), some),
    }
