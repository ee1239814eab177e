"""The loss scale that lifts flushed or subnormal gradients back into the normal range of FP16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.gradient_underflow import GradientSeries, GradientSurvey, tail_of
from precdoctor.diagnosis.survey.rows import Key, TensorRow
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16, Format

#: Gradients whose flushed share a plan predicts, the worst first: each one costs the rows of a step.
_PREDICTED = 16


@dataclass(frozen=True)
class ScalePlan:
    """A power of two for the loss, with the largest flushed share before and after, and the headroom left."""

    binades: int
    before: float
    after: float
    headroom: float


def plan_scale(
    view: RunView,
    found: GradientSurvey,
    guilty: Mapping[Key, GradientSeries],
    *,
    target: float,
    margin: float,
    subnormal: float = 1.0,
) -> ScalePlan:
    """The smallest power of two that brings the worst gradient to both targets, or else to the first, or the largest.

    Args:
        target: flushed share to reach.
        margin: binades that stay free below overflow.
        subnormal: share of subnormal elements to reach; 1: any.
    """
    most = max(0, math.floor(found.headroom - margin))
    rows = list(_worst_rows(view, guilty))
    before = _worst_share(rows, 0) if rows else 1.0
    enough = [k for k in range(1, most + 1) if _worst_share(rows, k) <= target] if rows else []
    chosen = next((k for k in enough if _subnormal(rows, k) <= subnormal), enough[0] if enough else most)
    return ScalePlan(chosen, before, _worst_share(rows, chosen), found.headroom - chosen)


def _worst_rows(view: RunView, guilty: Mapping[Key, GradientSeries]) -> Iterable[tuple[TensorRow, Format]]:
    for key, tensor in sorted(guilty.items(), key=lambda item: -item[1].share)[:_PREDICTED]:
        row = next((r for r in view.rows(*tensor.worst) if r.key == key), None)
        if row is not None and not tensor.dead:
            yield row, tensor.fmt


def _worst_share(rows: Sequence[tuple[TensorRow, Format]], binades: int) -> float:
    """The largest flushed share among ``rows`` with a loss ``2**binades`` times as large."""
    worst = 0.0
    for row, fmt in rows:
        tail = tail_of(row, fmt)
        intended = tail.total + row.numel - row.zero
        worst = max(worst, tail.still_flushed(fmt, 2.0**binades) / intended if intended else 0.0)
    return worst


def _subnormal(rows: Sequence[tuple[TensorRow, Format]], binades: int) -> float:
    """The largest share of elements below the normal range, zeros that were flushed among them, likewise."""
    worst = 0.0
    for row, fmt in rows:
        tail = tail_of(row, fmt)
        lost = tail.still_flushed(fmt, 2.0**binades * fmt.flush_limit / fmt.min_normal)
        survivors = row.histogram.at_most(fmt.min_normal / 2.0**binades).low
        worst = max(worst, (lost + survivors) / max(1.0, tail.total + row.histogram.total))
    return worst


def prescribe_scale(view: RunView, fmt: Format, current: float, plan: ScalePlan) -> Prescription:
    """The loss scale of the plan, or BF16 if no larger scale fits."""
    if plan.binades == 0:
        return Prescription(
            title=f"use BF16 autocast: FP16 leaves {plan.headroom:.1f} binades for a larger loss scale, too few",
            change={"autocast_dtype": {"from": fmt.dtype, "to": "bfloat16"}},
            predicted={"flushed_share": {"from": plan.before, "to": 0.0}},
            snippet=snippets.bfloat16_autocast(view.device),
        )
    scale = multiplied(current, plan.binades)
    return Prescription(
        title=f"loss scale 2^{round(math.log2(scale))}: flushed {percent(plan.before)} -> {percent(plan.after)}",
        change={"loss_scale": {"from": current, "to": scale}},
        predicted={
            "flushed_share": {"from": plan.before, "to": plan.after},
            "overflow": 0,
            "headroom_binades": round(plan.headroom, 1),
        },
        snippet=snippets.grad_scaler(view.device, scale),
    )


def multiplied(scale: float, binades: int) -> float:
    """``scale``, rounded to a power of two, times ``2**binades``."""
    return float(2.0 ** (round(math.log2(scale)) + binades))


def loss_scale_of(view: RunView, row: TensorRow) -> float:
    """The loss scale that a gradient carries, or else the one in force at its step; 1 without any."""
    facts = view.step_facts(row.process, row.step)
    return (row.scale or (facts.loss_scale if facts is not None else None)) or 1.0


def subnormal_share(row: TensorRow, binades: int) -> float:
    """FP16 subnormals among the non-zero elements with a loss ``2**binades`` times as large; exact."""
    return row.histogram.at_most(FP16.min_normal / 2.0**binades).low / max(1, row.histogram.total)


def out_of_subnormals(row: TensorRow, room: float, *, target: float) -> tuple[int, float]:
    """The fewest binades, at most ``room``, that leave ``target`` of ``row`` subnormal; and the share they leave."""
    most = max(1, math.floor(room))
    chosen = next((k for k in range(1, most + 1) if subnormal_share(row, k) <= target), most)
    return chosen, subnormal_share(row, chosen)
