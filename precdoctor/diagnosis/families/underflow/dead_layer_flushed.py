"""PD203, flushed layers: the loss gives weights a gradient, but FP16 flushed it to zero on the way.

The zeros begin after the last gradient of the backward pass with a non-zero element. If no element of that gradient is
above FP16's smallest normal number (or, in a wider format, above what FP16 flushes), the gradients after it were
flushed. If there is no such gradient, the cast after the loss flushed everything. If gradients elsewhere are well
inside the format, the loss itself gives a gradient of zero (a weight of zero): no finding of this module. Neither is a
loss that is exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.advice.larger_loss_scale import multiplied, out_of_subnormals, subnormal_share
from precdoctor.diagnosis.analyses.gradient_underflow import FINE_BITS, MARGIN_BINADES
from precdoctor.diagnosis.analyses.harm import mean_bits
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import named, percent, plural
from precdoctor.diagnosis.survey.rows import TensorRow, gradient_evidence, location, range_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16

#: Share of the elements of all weight matrices from which the finding is an error: that is more than one layer.
_ERROR_SHARE = 0.5
#: Binades above the smallest normal number to which a loss scale lifts an estimated gradient. Chosen empirically.
_MARGIN = 4
#: Subnormal share of the last non-zero gradient that a prescribed loss scale aims at. Chosen empirically.
_TARGET_SHARE = 0.01


@dataclass(frozen=True)
class FlushedZeros:
    """The place at which the gradients of one step become zero.

    Attributes:
        first: the first weight gradient, in backward order, that is zero.
        last: the last output gradient before ``first`` with a non-zero element; None if all of them are zero.
        element: estimate of one element of the model's output gradient, without the loss scale; None with ``last``, or
            if unknown.
        rows: all tensors of the step.
    """

    first: TensorRow
    last: TensorRow | None
    element: float | None
    rows: Sequence[TensorRow]

    @property
    def scale(self) -> float:
        """The loss scale of the step."""
        return self.first.scale or 1.0


def find_flushed_zeros(view: RunView, first: TensorRow) -> FlushedZeros | None:
    """The place at which FP16 flushed the weight gradients from ``first`` on; None if something else made them zero."""
    rows = view.rows(first.process, first.step)
    facts = view.step_facts(first.process, first.step)
    gradients = [r for r in rows if r.kind == "grad_output" and r.order is not None and r.phase != "recompute"]
    narrow = any(r.dtype == FP16.dtype for r in gradients)
    if (not narrow and (facts is None or facts.autocast_dtype != FP16.dtype)) or loss_is_zero(rows):
        return None
    alive = [r for r in gradients if not r.is_zero]
    last = max((r for r in alive if r.position < first.position), key=lambda r: r.position, default=None)
    if last is not None:
        limit = FP16.min_normal if last.dtype == FP16.dtype else FP16.flush_limit
        return FlushedZeros(first, last, None, rows) if (last.amax or 0.0) <= limit else None
    if any(mean_bits(r.histogram, FP16) >= FINE_BITS.default for r in alive):
        return None
    return FlushedZeros(first, None, _element_gradient(gradients, rows, first.scale or 1.0), rows)


def loss_is_zero(rows: Sequence[TensorRow]) -> bool:
    """Whether the loss of a step is exactly zero: then its gradients may be as well, and no format flushed them."""
    losses = [r for r in rows if r.kind == "loss"]
    return bool(losses) and all(r.is_zero for r in losses)


def _element_gradient(gradients: Sequence[TensorRow], rows: Sequence[TensorRow], scale: float) -> float | None:
    """The unscaled loss divided by the number of elements of the output gradient nearest to it; None if unknown.

    An element's gradient has this order of magnitude if the loss is a mean over elements of order one.
    """
    loss = next((r.amax / (r.scale or scale) for r in rows if r.kind == "loss" and r.amax), None)
    numel = min(gradients, key=lambda r: r.position).numel if gradients else 0
    return loss / numel if loss and numel else None


def flushed_finding(
    rule: Rule, view: RunView, zeros: FlushedZeros, parameters: Sequence[str], elements: tuple[int, int],
    steps: tuple[int, int], limit: float,
) -> Finding:  # fmt: skip
    """The finding for all weights whose gradient was flushed.

    Args:
        elements: number of their elements, and of the elements of all weight matrices.
        steps: number of recorded steps with a zero gradient, and of all recorded steps.
    """
    first, last = zeros.first, zeros.last
    row = last or first
    begin = f"behind `{last.place}`" if last is not None else "at the cast of the model's output"
    return rule.finding(
        severity=Severity.ERROR if elements[0] >= _ERROR_SHARE * elements[1] else Severity.WARNING,
        confidence=0.85 if last is not None else 0.75,
        title=f"gradients are flushed to zero in FP16 {begin}: {plural(len(parameters), 'weight')} got none on "
        f"{steps[0]:,} steps",
        message=f"The gradient of {named(parameters)} was exactly zero in every element on {steps[0]:,} of "
        f"{plural(steps[1], 'recorded step')} (limit {limit:g}). {elements[0]:,} of {elements[1]:,} elements get no "
        f"gradient. {_cause(zeros)} Loss scale: {zeros.scale:g}.",
        location=location(first, Phase.BACKWARD, first.process, first.step),
        evidence={
            "zero_gradient_steps": steps[0],
            "limit": limit,
            "dead_weights": list(parameters[:16]),
            "dead_elements": elements[0],
            "zeros_begin_at": first.module or first.root,
            "last_alive": row.module or row.root if last is not None else None,
            "loss_scale": zeros.scale,
            **gradient_evidence(zeros.rows, first),
            "range": range_evidence(row),
            "confidence_reason": "the last non-zero gradient lies at the end of FP16's range"
            if last is not None
            else "every FP16 gradient is zero from the loss on; its exact size is estimated from the loss",
        },
        prescriptions=_prescriptions(view, zeros, elements),
    )


def _cause(zeros: FlushedZeros) -> str:
    """Sentences: the last non-zero gradient, or the estimated one, against FP16's flush limit."""
    if (last := zeros.last) is not None:
        return (
            f"The last non-zero gradient is that of the output of `{last.place}` ({last.dtype}). Its largest element "
            f"is {last.amax or 0.0:.3g}; FP16 flushes up to {FP16.flush_limit:.3g}."
        )
    words = "All FP16 gradients are zero, from the first one behind the loss on."
    if zeros.element is None:
        return words
    scaled = zeros.element * zeros.scale
    return f"{words} Each of its elements should be about {scaled:.2g}; FP16 flushes up to {FP16.flush_limit:.3g}."


def _prescriptions(view: RunView, zeros: FlushedZeros, elements: tuple[int, int]) -> tuple[Prescription, ...]:
    """A loss scale that brings the gradient out of the subnormals, if the log yields one; and BF16."""
    dead = {"from": elements[0], "to": 0}
    bfloat16 = Prescription(
        title=f"use BF16 autocast, which has FP32's range: dead elements {elements[0]:,} -> 0",
        change={"autocast_dtype": {"from": FP16.dtype, "to": "bfloat16"}},
        predicted={"dead_elements": dead},
        snippet=snippets.bfloat16_autocast(view.device),
    )
    last, scale = zeros.last, zeros.scale
    if last is not None:
        largest = max((r.amax or 0.0 for r in zeros.rows if r.kind in ("grad_output", "weight_grad")), default=0.0)
        room = FP16.headroom(largest) - MARGIN_BINADES.default if largest else 0.0
        if room < 1.0:
            return (bfloat16,)
        binades, after = out_of_subnormals(last, room, target=_TARGET_SHARE)
        to, before = multiplied(scale, binades), subnormal_share(last, 0)
        effect = f": subnormal in the gradient of `{last.place}` {percent(before)} -> {percent(after)}"
        predicted = {"subnormal_share": {"from": before, "to": after}, "headroom_binades": round(room - binades, 1)}
    elif not zeros.element or zeros.element * scale > FP16.min_normal:
        return (bfloat16,)
    else:
        to = 2.0 ** (math.ceil(math.log2(FP16.min_normal / zeros.element)) + _MARGIN)
        element = f"{zeros.element * to:.2g}"
        effect = (
            f", which makes an element of the output's gradient about {element}: dead elements {elements[0]:,} -> 0"
        )
        predicted = {"dead_elements": dead}
    scaled = Prescription(
        title=f"loss scale 2^{round(math.log2(to))}{effect}",
        change={"loss_scale": {"from": scale, "to": to}},
        predicted=predicted,
        snippet=snippets.grad_scaler(view.device, to),
    )
    return scaled, bfloat16
