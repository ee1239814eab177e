"""The columns that only rows of kind ``logits`` have, made on the drain thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from precdoctor.recording.slots.slot_table import Entry
from precdoctor.runlog import arrays


def sharpness_columns(entries: Sequence[Entry], logits: Sequence[int]) -> dict[str, Any]:
    """What softmaxes are for, their entropy, and the largest logit and the relative entropy of each head.

    Args:
        entries: of all rows of a step.
        logits: which of them are of logits; no columns where there are none.
    """
    if not logits:
        return {}
    rows = len(entries)
    roles: list[str | None] = [None] * rows
    entropy, known = np.full(rows, math.nan), np.zeros(rows, np.bool_)
    sizes, numbers = np.zeros(rows, np.int64), {}
    for row in logits:
        sharpness = entries[row].sharpness
        assert sharpness is not None, "that is what makes it one of these rows"
        values = sharpness.numbers()
        roles[row], entropy[row], numbers[row] = sharpness.role or None, values[0], values[1:]
        known[row], sizes[row] = True, sharpness.heads
    some = sizes > 0
    largest = [v for row in logits for v in numbers[row][: sizes[row]]]
    relative = [v for row in logits for v in numbers[row][sizes[row] :]]
    return {
        "role": arrays.strings(roles),
        "entropy": arrays.numbers(entropy, known),
        "head_max": arrays.lists(sizes, arrays.numbers(np.array(largest)), some),
        "head_entropy": arrays.lists(sizes, arrays.numbers(np.array(relative)), some),
    }
