"""PD202: weight gradients are rounded to zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from precdoctor.diagnosis.advice.larger_loss_scale import loss_scale_of, plan_scale, prescribe_scale
from precdoctor.diagnosis.analyses.gradient_underflow import (
    FLUSH_OPTIONS,
    GradientSeries,
    GradientSurvey,
    examined_steps,
    flush_confidence,
    survey,
    tail_of,
)
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import at, finite, firsts, groups, histograms, keys, on_steps, worst_rows
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Key, TensorRow, dotted, gradient_evidence, location
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.formats import FP16
from precdoctor.numerics.histogram import Histograms
from precdoctor.numerics.tail import flushed_tail, flushed_tails, magnitudes

PAGE = RulePage(
    finds="""
Gradients of weights with a large share rounded to zero in FP16 or BF16, while the gradients of the activations are
still whole: the product of a small activation and a small gradient falls below the format, or a mean over many rows
does. Autocast computes such a gradient in FP16 and then widens it to FP32; the rule recognises it because no element
is below 2^-24. PD201's method separates flushed elements from structural zeros (rows of an embedding that nobody
looked up, dead units): the survivors must run into the flush limit, and their shape estimates how many lie below it.

FP32 gradients that were rounded on their way (by a hook that compresses them, in a reduction) show it: all their
elements are multiples of one power of two on every step, and the gradient of the layer's output is finer than that.
The same limits apply to them.
""",
    matters="""
A weight whose gradient is zero gets no update from the loss; under Adam even the moments decay to nothing. Layers with
small inputs are hit first (badly scaled features, the input of a quiet branch), and nothing is ever NaN.
""",
    example="""
Features in units that make them 1e-4, in FP16: the gradient of the first layer's weight is the output gradient times
the features.

    model.half()(features * 1e-4)                       # most of the first weight gradient is 0
    model.half()((features - mean) / std)               # none of it
""",
    remedy="""
Scale the loss by the power of two in the finding, or bring the layer's input to order 1. BF16 has FP32's range and
needs neither. Where gradients are compressed to FP16, divide by the workers afterwards, in FP32, or compress to BF16.
""",
    confidence="""
0.9; 0.7 if fewer than four steps were sampled; 0.6 below 1,000 surviving elements. PD201's page states the accuracy of
the estimator, which errs towards too few flushed elements.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "NVIDIA BioNeMo framework, published gradient-underflow bands 0.5 / 2 / 4 %",
        "PyTorch source: torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (fp16_compress_hook)",
    ),
)
#: Minimum number of steps that must all show the same grid: one or two may do so by chance.
_GRID_STEPS = 4
#: Minimum number of elements of a gradient that is tested for a grid: fewer may be multiples of it by chance.
_GRID_ELEMENTS = 64
#: Largest ``sum`` in units of the grid, and ``sum_sq`` in squared units, that FP64 certainly holds exactly.
_EXACT = 2.0**50
_COLUMNS = ("phase", "numel", "zero", "nan", "pos_inf", "neg_inf", "amax", "amin_nonzero", "sum", "sum_sq", "exp_lo",
            "exp_hist")  # fmt: skip


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the worst weight gradient, with all others above the limits; else the worst on a grid."""
    dying = options["flushed_share"]
    gradients = survey(view, max_steps=options["max_steps"], dying_share=dying, kind="weight_grad")
    seen = f"{plural(len(gradients.tensors), 'weight gradient')} on {plural(len(gradients.steps), 'step')}"
    limits = options["flushed_share"], options["lost_magnitude"]
    guilty = {k: t for k, t in gradients.tensors.items() if t.share >= limits[0] and t.lost_share >= limits[1]}
    if guilty:
        finding = _finding(view, gradients, guilty, options)
        return Checked([finding], f"{plural(len(guilty), 'gradient')} of {seen} above the limit")
    gridded = {
        k: g
        for k, g in _gridded_gradients(view, options["max_steps"]).items()
        if g.share >= limits[0] and g.lost_share >= limits[1] and _finer(view, k, g) is not None
    }
    if gridded:
        finding = _grid_finding(view, gridded, options)
        return Checked([finding], f"{plural(len(gridded), 'FP32 gradient')} rounded to a coarse grid")
    if not gradients.tensors:
        return Checked.not_applicable("no weight gradient is stored in FP16 or BF16, or was rounded to it")
    worst = max(t.share for t in gradients.tensors.values())
    return Checked((), f"{seen}: {percent(worst)} flushed in the worst (limit {percent(limits[0])})")


def _finding(view: RunView, found: GradientSurvey, guilty: Mapping[Key, GradientSeries], options: Options) -> Finding:
    key, tensor = max(guilty.items(), key=lambda item: item[1].share)
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    current = loss_scale_of(view, row)
    activations = survey(view, max_steps=options["max_steps"], dying_share=options["flushed_share"])
    limited = replace(found, headroom=min(found.headroom, activations.headroom))
    chosen = plan_scale(view, limited, guilty, target=options["flushed_share"] / 10.0, margin=options["margin_binades"])
    structural = max(0.0, row.zero - tail_of(row, tensor.fmt).total) / row.numel
    name = tensor.fmt.name
    message = (
        f"Rounding to {name} set {percent(tensor.share)} of the gradient of `{row.parameter}` to zero, in the median "
        f"of {plural(tensor.steps, 'step')} (limit {percent(options['flushed_share'])}). It removed "
        f"{percent(tensor.lost_share)} of the magnitude (limit {percent(options['lost_magnitude'])}); another "
        f"{percent(structural)} is zero for other reasons. The largest element left is {row.amax or 0.0:.3g}; "
        f"{name} flushes up to {tensor.fmt.flush_limit:.3g}. Loss scale: {current:g}. "
        f"{plural(len(guilty), 'gradient')} of {len(found.tensors):,} above the limits."
    )
    output_gradient = next((r for r in rows if r.kind == "grad_output" and r.layer == key[:2] and r.amax), None)
    if output_gradient is not None:
        message += (
            f" The gradient of the module's output reaches {output_gradient.amax:.3g}, so the module's input is small."
        )
    confidence, why = flush_confidence(row, min(tensor.steps, len(found.steps)))
    return RULE.finding(
        severity=Severity.ERROR if tensor.share >= options["error_share"] else Severity.WARNING,
        confidence=confidence,
        title=f"{percent(tensor.share)} of the gradient of `{row.parameter}` is flushed to zero in {name}",
        message=message,
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            "flushed_share": tensor.share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": tensor.lost_share,
            "structural_zero_share": structural,
            "computed_in": tensor.fmt.dtype,
            "loss_scale": current,
            "steps_examined": len(found.steps),
            "tensors": _listed_tensors({k: g.share for k, g in guilty.items()}),
            **gradient_evidence(rows, row),
            "confidence_reason": why,
        },
        prescription=prescribe_scale(view, tensor.fmt, current, chosen),
    )


def _listed_tensors(shares: Mapping[Key, float]) -> list[dict[str, object]]:
    """The sixteen gradients with the largest flushed share, for the evidence."""
    worst = sorted(shares.items(), key=lambda item: -item[1])[:16]
    return [{"root": k[0], "parameter": dotted(k[1], k[3]), "flushed_share": share} for k, share in worst]


# -- FP32 gradients on a grid -----------------------------------------------------------------------------------------
#
# Rounding to FP16 near zero leaves whole multiples of 2^-24, its smallest subnormal. If gradients are divided by the
# number of workers before the rounding and multiplied by it afterwards, the grid is that many times coarser. Sums of
# products in FP32 do not lie on such a grid, and never on the same one on every step. The histogram in units of the
# grid shows how many elements were rounded to zero.


@dataclass(frozen=True)
class _GriddedSeries:
    """A gradient whose non-zero elements are multiples of ``grid`` on every step; shares are medians over the steps.

    Attributes:
        grid: the smallest non-zero element, a power of two.
        steps: number of rows.
        share: lower bound of the share of the intended non-zero elements that was rounded to zero.
        lost_share: share of the magnitude that was rounded to zero.
        worst: process and step with the largest ``share``.
    """

    grid: float
    steps: int
    share: float
    lost_share: float
    worst: tuple[Process, int]


def _gridded_gradients(view: RunView, max_steps: float) -> dict[Key, _GriddedSeries]:
    """The FP32 weight gradients on the same grid on all steps, none of them with FP16 autocast or a loss scale."""
    steps = examined_steps(view, max_steps)
    where = [("dtype", "in", ("float32",))]
    rows = view.measured((), ("weight_grad",), columns=_COLUMNS, steps=steps, where=where)
    rows = rows[(rows["numel"] >= _GRID_ELEMENTS) & (rows["zero"] < rows["numel"]) & (rows["phase"] != "recompute")]
    plain = {
        (process, s.step)
        for process, facts in view.timeline.items()
        for s in facts
        if s.autocast_dtype != FP16.dtype and s.loss_scale is None
    }
    ids, grid = groups(rows, IDENTITY), np.where(on_steps(rows, plain), _grid(rows), np.nan)
    on_grid = grid == grid[firsts(ids)][ids]
    always = np.bincount(ids, on_grid) == np.bincount(ids)
    rows = rows.assign(grid=grid)[(always & (np.bincount(ids) >= _GRID_STEPS))[ids]]
    return _gridded_series(rows) if len(rows) else {}


def _grid(rows: pd.DataFrame) -> Floats:
    """The grid of each row: its smallest element, if that is a power of two that divides all others; else NaN.

    The sum, the sum of squares and the amax stand for the elements, which the log does not hold.
    """
    least = column(rows, "amin_nonzero")
    counts = np.abs(rows[["amax", "sum", "sum_sq"]].to_numpy(np.float64)) / least[:, None]
    counts[:, 2] /= least
    divides = ((counts <= _EXACT) & (counts == np.round(counts))).all(axis=1)
    return np.where(divides & finite(rows) & (np.frexp(least)[0] == 0.5), least, np.nan)


def _gridded_series(rows: pd.DataFrame) -> dict[Key, _GriddedSeries]:
    """The flushed shares of the gridded gradients, by PD201's estimator after a shift of their grid to FP16's."""
    grid, found = column(rows, "grid"), histograms(rows)
    binades = np.frexp(FP16.min_subnormal / grid)[1] - 1  # from the gradient's grid to FP16's
    shifted = Histograms(found.lo + binades, found.lengths, found.counts)
    tails = flushed_tails(shifted, rows["zero"].to_numpy(), FP16)
    shares = tails.total / (tails.total + column(rows, "numel") - column(rows, "zero"))
    rows = rows.assign(share=shares, lost=tails.mass / (magnitudes(shifted) + tails.mass))
    ids = groups(rows, IDENTITY)
    first, worst = rows.iloc[firsts(ids)], rows.iloc[worst_rows(ids, shares)]
    medians = rows[["share", "lost"]].groupby(ids).median().to_numpy().tolist()
    columns = zip(keys(first), first["grid"], np.bincount(ids).tolist(), medians, at(worst), strict=True)
    return {key: _GriddedSeries(own, steps, share, lost, of) for key, own, steps, (share, lost), of in columns}


def _finer(view: RunView, key: Key, gradient: _GriddedSeries) -> float | None:
    """The smallest element of the module's output gradient at the worst step, if it is below the grid; else None."""
    output_gradients = (r for r in view.rows(*gradient.worst) if r.kind == "grad_output" and r.layer == key[:2])
    return next((r.amin_nonzero for r in output_gradients if r.amin_nonzero and r.amin_nonzero < gradient.grid), None)


def _grid_finding(view: RunView, guilty: Mapping[Key, _GriddedSeries], options: Options) -> Finding:
    key, worst = max(guilty.items(), key=lambda item: item[1].share)
    process, step = worst.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    return RULE.finding(
        severity=Severity.ERROR if worst.share >= options["error_share"] else Severity.WARNING,
        confidence=0.85,
        title=f"at least {percent(worst.share)} of the gradient of `{row.parameter}` is rounded to zero: it arrives in "
        f"steps of {worst.grid:.3g}",
        message=f"Every element of the gradient of `{row.parameter}` is a multiple of {worst.grid:.3g}, "
        f"2^{math.frexp(worst.grid)[1] - 1}, on {plural(worst.steps, 'step')}, and {percent(row.zero / row.numel)} are "
        "zero. FP32 resolves down to 1e-45, and the gradient of the module's output reaches down to "
        f"{_finer(view, key, worst) or 0.0:.3g}. So the gradient was rounded on its way: to FP16 by a hook, or in a "
        f"compressed reduction. The rounding set at least {percent(worst.share)} of it to zero (median, limit "
        f"{percent(options['flushed_share'])}), {percent(worst.lost_share)} of its magnitude (limit "
        f"{percent(options['lost_magnitude'])}). {plural(len(guilty), 'gradient')} above the limits.",
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            "flushed_share": worst.share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": worst.lost_share,
            "grid": worst.grid,
            "steps_examined": worst.steps,
            "tensors": _listed_tensors({k: g.share for k, g in guilty.items()}),
            **gradient_evidence(rows, row),
            "confidence_reason": "sums and squares are whole multiples of one power of two on every step; the share is "
            "estimated from the survivors",
        },
        prescription=_prescribe(row, worst, options["flushed_share"] / 10.0, options["margin_binades"]),
    )


def _prescribe(row: TensorRow, gradient: _GriddedSeries, target: float, margin: float) -> Prescription:
    """Scale the gradients while they are rounded, by the smallest power of two that flushes at most ``target``.

    If none does within the headroom less ``margin`` binades, by the largest one that fits, at least 2.
    """
    shift = FP16.min_subnormal / gradient.grid  # from the gradient's grid to FP16's
    tail = flushed_tail(row.histogram.shift(shift), row.zero, FP16)
    intended = tail.total + row.numel - row.zero

    def flushed(binades: int) -> float:
        """The flushed share if the gradient is rounded 2^binades times larger."""
        return tail.still_flushed(FP16, 2.0**binades) / intended

    room = math.floor(FP16.headroom((row.amax or 0.0) * shift) - margin)
    binades = next((k for k in range(1, room + 1) if flushed(k) <= target), max(1, room))
    return Prescription(
        title=f"round gradients 2^{binades} times larger: flushed {percent(flushed(0))} -> {percent(flushed(binades))}",
        change={"gradient_scale_when_rounded": {"from": 1.0, "to": 2.0**binades}},
        predicted={"flushed_share": {"from": flushed(0), "to": flushed(binades)}, "overflow": 0},
        snippet=(
            f"scale = 2.0**{binades}\n"
            "(loss * scale).backward()  # what rounds the gradients gets larger ones\n"
            "for p in model.parameters():\n"
            "    if p.grad is not None:\n"
            "        p.grad.div_(scale)  # in FP32, before clipping and the optimizer's step\n"
        ),
    )


RULE = Rule(
    code="PD202",
    name="weight-gradient-underflow",
    severity=Severity.ERROR,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=FLUSH_OPTIONS,
    explains=when(anywhere, "PD203", "PD303", "PD305"),
    check=check,
    newer_half=True,
)
