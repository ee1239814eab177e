"""Logits in 16 bits that have grown until their format no longer tells neighbours a nat or two apart from each other.

A softmax depends on differences of logits, in nats. Rounding moves a logit by up to half the spacing of its format, and
the probability by a factor of e to that: where the spacing is 2 nats, a factor of e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.survey.histories import History, forward_histories
from precdoctor.diagnosis.survey.op_dtypes import op_dtypes
from precdoctor.diagnosis.survey.parameters import HALF
from precdoctor.diagnosis.survey.rows import Key, known_format
from precdoctor.diagnosis.survey.scans import short_name
from precdoctor.diagnosis.survey.view import RunView

#: Newest recorded steps that are looked at; on half of them the spacing must be above its limit.
_NEWEST = 8
_SOFTMAX = ("softmax", "log_softmax", "softmax_backward_data", "log_softmax_backward_data", "logsumexp")


@dataclass(frozen=True)
class CoarseLogits:
    """Attributes:
    history: their amax by step.
    first, last: median amax over the first four recorded steps, and over those of the newest with a wide spacing.
    spacing: of the format at ``last``, in nats.
    """

    history: History
    first: float
    last: float
    spacing: float


def spacing(dtype: str, magnitude: float) -> float:
    """Distance of neighbours in the format at ``magnitude``: one ulp; 0 where the format is not known."""
    fmt = known_format(dtype)
    if fmt is None or magnitude <= 0.0:
        return 0.0
    return 2.0 ** (math.floor(math.log2(magnitude)) - fmt.mantissa_bits)


def coarse_logits(view: RunView, widest: float, grown: float) -> Mapping[Key, CoarseLogits]:
    """What a softmax reads in 16 bits: neighbours ``widest`` nats apart or more, ``grown`` times its first size."""
    found = {}
    for key, history in _logits(view).items():
        points = [amax for _, amax in history.points()]
        if len(points) < 2 * _NEWEST:
            continue
        wide = [a for a in points[-_NEWEST:] if spacing(history.dtype, a) >= widest]
        first = median(points[:4])
        if 2 * len(wide) >= _NEWEST and median(wide) >= grown * first:
            found[key] = CoarseLogits(history, first, median(wide), spacing(history.dtype, median(wide)))
    return found


def _logits(view: RunView) -> dict[Key, History]:
    """Outputs in half precision that have as many elements as a softmax around them, or in the loss code.

    Deep scans tell where softmaxes run and on how many elements; of several such outputs it is the last one before it.
    """
    sizes: dict[tuple[str, str], set[int]] = {}
    for op in op_dtypes(view):
        if short_name(op.op) in _SOFTMAX and op.calls:
            sizes.setdefault((op.root, op.module), set()).add(op.elements // op.calls)
    if not sizes:
        return {}
    histories = forward_histories(view)
    found: dict[Key, History] = {}
    for (root, module), wanted in sizes.items():
        inside = f"{module}." if module else ""
        near = [
            k
            for k, h in histories.items()
            if k[2] == "output" and h.dtype in HALF and h.numel in wanted
            if not root or (k[0] == root and (k[1] == module or k[1].startswith(inside)))
        ]
        if near:
            last = max(near, key=lambda k: histories[k].order)
            found[last] = histories[last]
    return found
