"""The prescriptions of PD301, for a loss scale that keeps falling or skipping; the smallest change comes first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from precdoctor.diagnosis.advice.prescription_order import is_worthwhile
from precdoctor.diagnosis.analyses.loss_scales import growth_interval
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Phase, Prescription
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Culprits, Overflow
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, TensorRow, known_format
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import BF16, FP16
from precdoctor.numerics.loss_scaling import STOCK_INTERVAL

#: Number of clean steps whose gradients are read, spread over the run, and again at its end; bounds the work.
_STEPS_READ = 8
#: Binades by which one batch's gradient may exceed the largest of the clean steps read. Chosen empirically. A gradient
#: that would have to be larger did not overflow: it has a pole, such as the slope of a root at zero, in any format.
_BATCH_SPREAD = 4


def lower_bound(steps: Sequence[StepFacts], least: float) -> float | None:
    """The scale below which the scaler does not go; None without such a bound.

    The scaler has a bound if at least ``least`` skips left its lowest scale unchanged although other skips lowered the
    scale. A constant written by hand has none: no skip lowers it.
    """
    scales = [s.loss_scale or 0.0 for s in steps]
    lowest = min(scales, default=0.0)
    skips = [(scale, after) for s, scale, after in zip(steps, scales, scales[1:], strict=False) if s.skipped]
    held_skips = sum(scale == lowest for scale, _ in skips)
    falls = any(after < scale for scale, after in skips)
    return lowest if falls and lowest > 0.0 and held_skips >= least else None


def prescriptions(
    view: RunView, steps: Sequence[StepFacts], start: float, end: float, culprits: Culprits, bound: float | None
) -> tuple[Prescription, ...]:
    """At least one prescription; of a scaler without a bound only such as save a good part of the skipped steps.

    Args:
        steps: all scaled steps of the process, including skipped ones.
        start, end: the scale before and after the fall.
        bound: the scaler's :func:`lower_bound`.
    """
    candidates = _candidates(view, steps, start, end, culprits, bound)
    # with a bound, keep them all: removing it may save more skips than predicted
    return tuple(p for p in candidates if bound is not None or is_worthwhile(p)) or (_bfloat16(view, steps, end),)


def shorter_interval(
    view: RunView, process: Process, clean: int | None, start: float, end: float
) -> tuple[Prescription, ...]:
    """A growth interval of at most ``clean`` steps, so that the scale grows back to ``start``; empty for None."""
    if clean is None:
        return ()
    interval, known = 1 << clean.bit_length() - 1, growth_interval(view, process) or STOCK_INTERVAL
    return (
        Prescription(
            title=f"let the scale grow back between overflows: growth_interval {known:,.0f} -> {interval}; loss scale "
            f"at the end {end:g} -> about {start:g}",
            change={"growth_interval": {"from": known, "to": interval}},
            predicted={"loss_scale": {"from": end, "to": start}},
            snippet=snippets.grad_scaler(view.device, start, interval),
        ),
    )


def _candidates(
    view: RunView, steps: Sequence[StepFacts], start: float, end: float, culprits: Culprits, bound: float | None
) -> Iterator[Prescription]:
    """Yield the changes that apply, whatever their effect."""
    layer, examined, hits = culprits.most_frequent, len(culprits.overflows), culprits.hits
    fmt = known_format(layer.dtype) if layer is not None else None
    # An overflowed gradient reaches other layers, so FP32 in one layer may not suffice: _mended_steps counts that.
    forward = layer is not None and layer.phase is Phase.FORWARD
    if layer is not None and fmt is not None and forward and layer.module and 2 * hits >= examined:
        yield Prescription(
            title=f"run `{layer.module}` in FP32: it overflows {fmt.name} ({fmt.max:g}) in {hits} of {examined} steps",
            change={"module": layer.module, "dtype": {"from": layer.dtype, "to": "float32"}},
            predicted={
                "loss_scale": {"from": end, "to": start},
                "overflows_in_examined_steps": {"from": examined, "to": examined - hits},
            },
            snippet=snippets.run_in_float32(layer.module, view.device),
        )
        return
    if bound is not None and bound > 1.0:
        yield _without_bound(view, steps, bound)
    elif end > 1.0 and _never_falls(steps):
        yield _halve_after_skips(steps, end)
    elif end >= 1.0 and any(not s.skipped and s.loss_scale for s in steps):
        yield _lower_start(view, steps, end)
    if layer is not None and 2 * (saved := _mended_steps(view, steps, culprits)) >= examined:
        yield _layer_in_float32(view, layer, saved, examined)
    if bound is not None and bound > 1.0:
        yield _bfloat16(view, steps, end)


def _layer_in_float32(view: RunView, layer: Overflow, saved: int, examined: int) -> Prescription:
    """Run the overflowing layer in FP32, which saves ``saved`` of the ``examined`` overflows."""
    return Prescription(
        title=f"run `{layer.module}` in FP32: its gradients overflow FP16 ({FP16.max:g}), those around it fit; "
        f"overflows in examined steps {examined} -> {examined - saved}",
        change={"module": layer.module, "dtype": {"from": layer.dtype, "to": "float32"}},
        predicted={"overflows_in_examined_steps": {"from": examined, "to": examined - saved}},
        snippet=snippets.run_in_float32(layer.module, view.device),
    )


def _lower_start(view: RunView, steps: Sequence[StepFacts], end: float) -> Prescription:
    """Start at the scale that the run ended at, with the stock growth interval."""
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


def _never_falls(steps: Sequence[StepFacts]) -> bool:
    """Return whether every step was skipped, and none of the skips lowered the scale."""
    scales = [s.loss_scale or 0.0 for s in steps]
    return all(s.skipped for s in steps) and all(a <= b for a, b in itertools.pairwise(scales))


def _halve_after_skips(steps: Sequence[StepFacts], end: float) -> Prescription:
    """Lower the scale after a skipped step; the predicted number of skips is that of halvings from ``end`` to 1."""
    skipped, halvings = len(steps), math.ceil(math.log2(end))
    return Prescription(
        title=f"halve the scale after a skipped step, as `scaler.update()` without an argument does: skipped steps "
        f"{skipped} -> at most {min(skipped, halvings)}",
        change={"scale_after_skip": {"from": end, "to": end / 2.0}},
        predicted={"skipped_steps": {"from": skipped, "to": min(skipped, halvings)}},
        snippet="scaler.step(optimizer)\nscaler.update()  # no new scale given: it halves its own after a skip\n",
    )


def _without_bound(view: RunView, steps: Sequence[StepFacts], bound: float) -> Prescription:
    """Remove the scaler's lower bound; the predicted number of skips is an upper limit."""
    skipped = sum(s.skipped for s in steps)
    above = sum(s.skipped and (s.loss_scale or 0.0) > bound for s in steps)
    halvings = math.ceil(math.log2(bound))  # down to a scale of 1, and each costs a skipped step
    return Prescription(
        title=f"let the scale fall below {bound:g}, at most {halvings} halvings from 1: skipped steps {skipped} -> "
        f"at most {min(skipped, above + halvings)}",
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


# -- one layer in FP32 ------------------------------------------------------------------------------------------------
#
# Outside autocast, a module computes the gradients of its weights and of its input in FP32. The gradient of its input
# is then cast to FP16 for the module before, and the gradient of its output comes from the module after it: both must
# fit into FP16. They do if they are finite on the skipped step. Otherwise clean steps show whether they would fit: they
# hold every gradient with its scale.


def _mended_steps(view: RunView, steps: Sequence[StepFacts], culprits: Culprits) -> int:
    """Number of examined steps whose overflow would disappear if the layer ``culprits.most_frequent`` ran in FP32.

    0 if the layer does not overflow in the backward pass, has no name, or is not computed in FP16.
    """
    layer = culprits.most_frequent
    if layer is None or layer.phase is not Phase.BACKWARD or not layer.module or layer.dtype != FP16.dtype:
        return 0
    process = layer.row.process
    inside, outside = _largest_amax(view, process, steps, layer)
    scales = {s.step: s.loss_scale or 0.0 for s in steps}
    count = 0
    for overflow in culprits.overflows:
        if (overflow.root, overflow.module, overflow.phase) != (layer.root, layer.module, Phase.BACKWARD):
            continue
        rows, scale = view.rows(process, overflow.row.step), scales.get(overflow.row.step, 0.0)
        out_of_range = inside * scale * 2.0**_BATCH_SPREAD > FP16.max if inside else overflow.row.nan == 0
        others = [r for r in _gradients(rows) if not _is_widened_with(r, layer, _is_last(rows, layer))]
        count += out_of_range and (0.0 < outside * scale <= FP16.max or not any(r.bad for r in others))
    return count


def _largest_amax(view: RunView, process: Process, steps: Sequence[StepFacts], layer: Overflow) -> tuple[float, float]:
    """The largest unscaled gradient inside the layer, and outside it, over the clean steps read; 0 without any."""
    clean = [s for s in steps if s.sampled and not s.skipped and s.loss_scale]
    inside = outside = 0.0
    for step in {s.step for s in [*clean[:: max(1, math.ceil(len(clean) / _STEPS_READ))], *clean[-_STEPS_READ:]]}:
        rows = view.rows(process, step)
        last = _is_last(rows, layer)
        for row in _gradients(rows):
            size = (row.amax or 0.0) / row.scale if row.scale else 0.0
            if layer.holds(row):
                inside = max(inside, size)
            if not _is_widened_with(row, layer, last):
                outside = max(outside, size)
    return inside, outside


def _gradients(rows: Sequence[TensorRow]) -> list[TensorRow]:
    return [r for r in rows if r.kind in BACKWARD_KINDS]


def _is_widened_with(row: TensorRow, layer: Overflow, last: bool) -> bool:
    """Whether a gradient would also be in FP32 if the layer ran in FP32.

    The layer's weight gradients and all gradients inside it would. Its output gradient, which the modules around the
    layer share, would if the layer is the ``last`` one: then it comes from the loss.
    """
    return last if row.kind == "grad_output" and layer.lies_in(row) else layer.holds(row)


def _is_last(rows: Sequence[TensorRow], layer: Overflow) -> bool:
    """Whether the layer is the last one of its model to run, apart from the modules around it."""
    forward = [r for r in rows if r.kind in FORWARD_KINDS and r.root == layer.root and r.order is not None]
    orders = [r.order or 0 for r in forward if r.module == layer.module and r.kind == "output"]
    return bool(orders) and all((r.order or 0) <= max(orders) or layer.lies_in(r) for r in forward)
