"""Whether one layer in FP32 would save the steps that its FP16 gradients overflow in.

Outside of autocast, a module computes the gradients of its weights and of its input in FP32. The gradient of its input
is then cast to FP16 for whatever came before, and the gradient of its output comes from whatever comes behind it: those
have to fit. Whether they do is read from the skipped step itself, where they are finite there; else from steps that
went through, where every gradient is on record with the scale it carried.
"""

from __future__ import annotations

from collections.abc import Sequence

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Culprits, Overflow
from precdoctor.diagnosis.survey.origin import is_below
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, TensorRow
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16

#: Steps that went through whose gradients are read: the newest ones, and as many spread over all.
_READ = 8
#: Binades by which a batch may exceed the largest gradient of those steps. Further above it is no matter of range: a
#: root at zero has an infinite slope in any format.
_VARIES = 4


def relieved(view: RunView, steps: Sequence[StepFacts], found: Culprits) -> int:
    """On how many of the examined steps nothing would overflow with the layer that is shown in FP32.

    0 where it does not overflow in the backward pass, has no name, or is not computed in FP16.
    """
    shown = found.shown
    if shown is None or shown.phase is not Phase.BACKWARD or not shown.module or shown.dtype != FP16.dtype:
        return 0
    process = Process(shown.row.rank, shown.row.attempt)
    own, rest = _largest(view, process, steps, shown)
    scales = {s.step: s.loss_scale or 0.0 for s in steps}
    count = 0
    for overflow in found.overflows:
        if (overflow.root, overflow.module, overflow.phase) != (shown.root, shown.module, Phase.BACKWARD):
            continue
        rows, scale = view.rows(process, overflow.row.step), scales.get(overflow.row.step, 0.0)
        out_of_range = own * scale * 2.0**_VARIES > FP16.max if own else overflow.row.nan == 0
        others = [r for r in _gradients(rows) if not _inside(r, shown, _is_last(rows, shown))]
        count += out_of_range and (0.0 < rest * scale <= FP16.max or not any(r.bad for r in others))
    return count


def _largest(view: RunView, process: Process, steps: Sequence[StepFacts], shown: Overflow) -> tuple[float, float]:
    """The largest unscaled gradients of the layer and outside of it, over steps that went through; 0 without any."""
    clean = [s for s in steps if s.sampled and not s.skipped and s.loss_scale]
    own = rest = 0.0
    for step in {s.step for s in [*clean[:: max(1, len(clean) // _READ)][:_READ], *clean[-_READ:]]}:
        rows = view.rows(process, step)
        last = _is_last(rows, shown)
        for row in _gradients(rows):
            size = (row.amax or 0.0) / row.scale if row.scale else 0.0
            if row.root == shown.root and (row.module == shown.module or is_below(row.module, shown.module)):
                own = max(own, size)
            if not _inside(row, shown, last):
                rest = max(rest, size)
    return own, rest


def _gradients(rows: Sequence[TensorRow]) -> list[TensorRow]:
    return [r for r in rows if r.kind in BACKWARD_KINDS]


def _inside(row: TensorRow, shown: Overflow, last: bool) -> bool:
    """Whether the gradient would be computed in FP32 with the layer.

    That of its weights, and where nothing but the loss comes behind it that of its output, under whatever name.
    """
    if row.root != shown.root:
        return False
    if row.kind == "grad_output" and (row.module == shown.module or is_below(shown.module, row.module)):
        return last
    return row.module == shown.module or is_below(row.module, shown.module)


def _is_last(rows: Sequence[TensorRow], shown: Overflow) -> bool:
    """Whether no other module of the model runs behind it: modules around it only."""
    forward = [r for r in rows if r.kind in FORWARD_KINDS and r.root == shown.root and r.order is not None]
    own = [r.order or 0 for r in forward if r.module == shown.module and r.kind == "output"]
    return bool(own) and all(
        (r.order or 0) <= max(own) or r.module == shown.module or is_below(shown.module, r.module) for r in forward
    )
