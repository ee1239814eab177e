"""What to change where a loss scale keeps falling or its steps keep being skipped: the smaller change first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from precdoctor.diagnosis.advice.prescription_order import is_worthwhile
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Phase, Prescription
from precdoctor.diagnosis.families.loss_scaling.fp32_layer_option import relieved
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Culprits, Overflow
from precdoctor.diagnosis.survey.loss_scales import STOCK_INTERVAL
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP16


def lower_bound(steps: Sequence[StepFacts], least: float) -> float | None:
    """The scale below which the scaler does not go; None where there is none.

    It lowers its scale elsewhere, and ``least`` skips or more left it at its lowest. A constant written by hand has no
    bound: it does not move at all.
    """
    scales = [s.loss_scale or 0.0 for s in steps]
    lowest = min(scales, default=0.0)
    skips = [(scale, after) for s, scale, after in zip(steps, scales, scales[1:], strict=False) if s.skipped]
    held = sum(scale == lowest for scale, _ in skips)
    falls = any(after < scale for scale, after in skips)
    return lowest if falls and lowest > 0.0 and held >= least else None


def cures(
    view: RunView, steps: Sequence[StepFacts], start: float, end: float, found: Culprits, bound: float | None
) -> tuple[Prescription, ...]:
    """At least one, and first of all one that is predicted to save a good part of the skipped steps.

    Args:
        view: the run.
        steps: the scaler's updates, skipped ones among them.
        start, end: the scale before and after it fell.
        found: the layers that overflow.
        bound: as :func:`lower_bound` tells it.
    """
    offered = sorted(_candidates(view, steps, start, end, found, bound), key=lambda p: not is_worthwhile(p))
    if bound is None:  # what is said of a bound is the least it does
        offered = [p for p in offered if is_worthwhile(p)]
    return tuple(offered) or (_bfloat16(view, steps, end),)


def _candidates(
    view: RunView, steps: Sequence[StepFacts], start: float, end: float, found: Culprits, bound: float | None
) -> Iterator[Prescription]:
    shown, examined, hits = found.shown, len(found.overflows), found.hits
    fmt = known_format(shown.dtype) if shown is not None else None
    # A gradient that overflows is passed on: that one module in FP32 mends it, the log has to show.
    forward = shown is not None and shown.phase is Phase.FORWARD
    if shown is not None and fmt is not None and forward and shown.module and 2 * hits >= examined:
        yield Prescription(
            title=f"run `{shown.module}` in FP32: it overflows {fmt.name} ({fmt.max:g}) in {hits} of {examined} steps",
            change={"module": shown.module, "dtype": {"from": shown.dtype, "to": "float32"}},
            predicted={
                "loss_scale": {"from": end, "to": start},
                "overflows_in_examined_steps": {"from": examined, "to": examined - hits},
            },
            snippet=snippets.run_in_float32(shown.module, view.device),
        )
        return
    if bound is not None and bound > 1.0:
        yield _unbounded(view, steps, bound)
    elif end >= 1.0 and any(not s.skipped and s.loss_scale for s in steps):
        yield _lower_start(view, steps, end)
    if shown is not None and 2 * (saved := relieved(view, steps, found)) >= examined:
        yield _layer(view, shown, saved, examined)
    if bound is not None and bound > 1.0:
        yield _bfloat16(view, steps, end)


def _layer(view: RunView, shown: Overflow, saved: int, examined: int) -> Prescription:
    return Prescription(
        title=f"run `{shown.module}` in FP32, whose gradients overflow FP16 ({FP16.max:g}) first; those around it fit: "
        f"overflows in examined steps {examined} -> {examined - saved}",
        change={"module": shown.module, "dtype": {"from": shown.dtype, "to": "float32"}},
        predicted={"overflows_in_examined_steps": {"from": examined, "to": examined - saved}},
        snippet=snippets.run_in_float32(shown.module, view.device),
    )


def _lower_start(view: RunView, steps: Sequence[StepFacts], end: float) -> Prescription:
    target = 2.0 ** math.floor(math.log2(end))
    over = sum(s.skipped and (s.loss_scale or 0.0) <= target for s in steps)
    skipped = sum(s.skipped for s in steps)
    return Prescription(
        title=f"start at loss scale {target:g} and probe upwards every {STOCK_INTERVAL} steps: skipped steps "
        f"{skipped} -> {over}",
        change={"init_scale": target, "growth_interval": STOCK_INTERVAL},
        predicted={"skipped_steps": {"from": skipped, "to": over}},
        snippet=snippets.grad_scaler(view.device, target, STOCK_INTERVAL),
    )


def _unbounded(view: RunView, steps: Sequence[StepFacts], bound: float) -> Prescription:
    skipped = sum(s.skipped for s in steps)
    above = sum(s.skipped and (s.loss_scale or 0.0) > bound for s in steps)
    halvings = math.ceil(math.log2(bound))  # each of them costs one step; below 1 nothing is gained
    return Prescription(
        title=f"let the scale fall below {bound:g}: it is at most {halvings} halvings from 1, so that skipped steps "
        f"{skipped} -> {min(skipped, above + halvings)} at most",
        change={"lower_bound": {"from": bound, "to": 0.0}},
        predicted={"skipped_steps": {"from": skipped, "to": min(skipped, above + halvings)}},
        snippet=snippets.grad_scaler(view.device, bound, STOCK_INTERVAL),
    )


def _bfloat16(view: RunView, steps: Sequence[StepFacts], end: float) -> Prescription:
    skipped = sum(s.skipped for s in steps)
    return Prescription(
        title=f"use BF16 autocast without a scaler: at scale {end:g} gradients still leave FP16's range",
        change={"autocast_dtype": {"from": "float16", "to": "bfloat16"}},
        predicted={"largest_finite": {"from": FP16.max, "to": BF16.max}, "skipped_steps": {"from": skipped, "to": 0}},
        snippet=snippets.bfloat16_autocast(view.device),
    )
