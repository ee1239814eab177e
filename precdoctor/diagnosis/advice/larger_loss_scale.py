"""The loss scale that lifts flushed or subnormal gradients back into the normal range of FP16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.gradient_underflow import GradientSeries, GradientSurvey, tail_of
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import Key, TensorRow
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16, Format

#: Most gradients whose flushed share a plan predicts, the worst first: each requires the rows of a step.
_PREDICTED = 16


@dataclass(frozen=True)
class ScalePlan:
    """A factor ``2**binades`` for the loss, the largest flushed share before and after, and the headroom left."""

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
    """Plan the smallest factor at which the worst gradient meets both targets.

    If no factor meets both, the smallest that meets ``target``; if none does, the largest within ``margin``.

    Args:
        found: all gradients, for the headroom.
        guilty: the gradients to lift.
        target: flushed share to reach.
        margin: headroom to leave, in binades.
        subnormal: subnormal share to reach; 1 means any.
    """
    most = max(0, math.floor(found.headroom - margin))
    rows = list(_worst_rows(view, guilty))
    before = _worst_share(rows, 0) if rows else 1.0
    enough = [k for k in range(1, most + 1) if _worst_share(rows, k) <= target] if rows else []
    chosen = next((k for k in enough if _worst_subnormal_share(rows, k) <= subnormal), enough[0] if enough else most)
    return ScalePlan(chosen, before, _worst_share(rows, chosen), found.headroom - chosen)


def _worst_rows(view: RunView, guilty: Mapping[Key, GradientSeries]) -> Iterable[tuple[TensorRow, Format]]:
    for key, tensor in sorted(guilty.items(), key=lambda item: -item[1].share)[:_PREDICTED]:
        row = next((r for r in view.rows(*tensor.worst) if r.key == key), None)
        if row is not None and not tensor.dead:
            yield row, tensor.fmt


def _worst_share(rows: Sequence[tuple[TensorRow, Format]], binades: int) -> float:
    """Return the largest flushed share among ``rows`` if the loss is multiplied by ``2**binades``."""
    return max((share_flushed(row, fmt, fmt, 2.0**binades) for row, fmt in rows), default=0.0)


def share_flushed(row: TensorRow, fmt: Format, to: Format, scale: float) -> float:
    """Return the share of a gradient in ``fmt`` that the format ``to`` flushes if the loss is times ``scale``."""
    tail = tail_of(row, fmt)
    intended = tail.total + row.numel - row.zero
    return tail.still_flushed(to, scale) / intended if intended else 0.0


def _worst_subnormal_share(rows: Sequence[tuple[TensorRow, Format]], binades: int) -> float:
    """Return the largest share of elements that would be below the normal range, flushed ones included."""
    worst = 0.0
    for row, fmt in rows:
        tail = tail_of(row, fmt)
        lost = tail.still_flushed(fmt, 2.0**binades * fmt.flush_limit / fmt.min_normal)
        survivors = row.histogram.at_most(fmt.min_normal / 2.0**binades).low
        worst = max(worst, (lost + survivors) / max(1.0, tail.total + row.histogram.total))
    return worst


def prescribe_scale(view: RunView, fmt: Format, current: float, plan: ScalePlan) -> Prescription:
    """Prescribe the plan's loss scale, or BF16 autocast if no larger scale fits."""
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
    """Return ``scale``, rounded to a power of two, times ``2**binades``."""
    return float(2.0 ** (round(math.log2(scale)) + binades))


def loss_scale_of(view: RunView, row: TensorRow) -> float:
    """Return the loss scale recorded with a gradient, else that of its step, else 1."""
    facts = view.step_facts(row.process, row.step)
    return (row.scale or (facts.loss_scale if facts is not None else None)) or 1.0


def subnormal_share(row: TensorRow, binades: int) -> float:
    """Return the exact share of FP16 subnormals among the non-zero elements if the loss is times ``2**binades``."""
    return row.histogram.at_most(FP16.min_normal / 2.0**binades).low / max(1, row.histogram.total)


def out_of_subnormals(row: TensorRow, room: float, *, target: float) -> tuple[int, float]:
    """Return the fewest binades that bring the subnormal share to ``target``, else ``room``, and the share left."""
    most = max(1, math.floor(room))
    chosen = next((k for k in range(1, most + 1) if subnormal_share(row, k) <= target), most)
    return chosen, subnormal_share(row, chosen)
