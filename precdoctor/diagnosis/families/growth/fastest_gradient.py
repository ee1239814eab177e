"""Which weight gradient grew most between two steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precdoctor.diagnosis.survey.rows import TensorRow


def grown_most(
    before: Sequence[TensorRow], after: Sequence[TensorRow]
) -> tuple[TensorRow | None, float, Sequence[TensorRow]]:
    """The row of ``after``, the factor by which its L2 norm grew, and the rows of the backward pass around it.

    Norms are without their loss scale. None, 0 and nothing where no finite gradient is in both steps.
    """
    old = {r.key: r for r in before if r.kind == "weight_grad"}
    ratios = {
        r.key: _norm(r) / _norm(old[r.key])
        for r in after
        if r.kind == "weight_grad" and r.key in old and _norm(old[r.key]) and not r.bad
    }
    if not ratios:
        return None, 0.0, ()
    key = max(ratios, key=lambda k: ratios[k])
    backward = [r for r in after if r.kind in ("loss", "grad_output", "weight_grad")]
    return next(r for r in after if r.key == key), ratios[key], backward


def _norm(row: TensorRow) -> float:
    return math.sqrt(row.sum_sq or 0.0) / (row.scale or 1.0)
