"""PD308: gradients are unscaled in FP16, which flushes the elements that the loss scale had saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import (
    PARAMETER,
    at,
    finite,
    firsts,
    groups,
    on_steps,
    pairs,
    parameters,
    rows_of,
)
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.rows import Parameter, TensorRow, dotted, location, path_evidence, range_evidence
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16
from precdoctor.numerics.tail import magnitude

PAGE = RulePage(
    finds="""
FP16 weight gradients that carry a loss scale after the backward pass and are divided by it in FP16, before the
optimizer gets them: non-zero elements become zero. The log holds both tensors, so the rule counts the loss exactly:
zeros in the gradient that the optimizer got, less zeros in the accumulated one. If the optimizer gets them in FP32, the
smallest one left must still be a number of FP16 (2^-24 or more). Steps that clip are left out, because clipping also
makes gradients smaller. torch's own `GradScaler` refuses to unscale FP16 gradients; scaling by hand does it.
""",
    matters="""
A loss scale helps only if the division happens in a wider format. After a division in FP16, everything below 2^-25 is
zero again and everything below 2^-14 has lost bits: the scale was useless.
""",
    example="""
    (loss * 4096).backward()
    for p in model.parameters():
        p.grad /= 4096                      # in FP16: 1e-8 becomes 0
        master[p].grad = p.grad.float() / 4096   # in FP32: it stays
""",
    remedy="""
Keep FP32 master weights, convert the gradient to FP32 first and divide it there. `GradScaler` with FP32 weights and
FP16 autocast does all of it. If only a plain SGD step follows, you can also leave the gradients scaled and divide the
learning rate instead.
""",
    confidence="""
0.9: both tensors were counted. 0.75 if fewer than four steps were recorded.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, sections 3.1 and 3.2",
        "PyTorch source: torch/amp/grad_scaler.py, 'Attempting to unscale FP16 gradients.'",
    ),
)
_COLUMNS = ("dtype", "numel", "zero", "nan", "pos_inf", "neg_inf", "scale")


@dataclass(frozen=True)
class _GradientHistory:
    """A weight gradient over the steps on which it was recorded before and after unscaling.

    Attributes:
        share: share of its non-zero elements that unscaling set to zero, median over the steps.
        worst: process and step with the largest share.
    """

    numel: int
    share: float
    steps: int
    worst: tuple[Process, int]


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the weight gradient that loses the largest share."""
    limit = options["flushed_share"]
    gradients = {p: g for p, g in _survey(view).items() if g.share < limit or _flushed_by_half(*_rows(view, p, g))}
    if not gradients:
        return Checked.not_applicable("no FP16 weight gradient carries a loss scale that is removed before the step")
    seen = f"{plural(len(gradients), 'FP16 gradient')} before and after unscaling"
    guilty = {p: g for p, g in gradients.items() if g.share >= limit}
    if not guilty:
        worst = max(g.share for g in gradients.values())
        return Checked((), f"{seen}: {percent(worst)} flushed in the worst (limit {percent(limit)})")
    return Checked([_finding(view, guilty, options)], f"{len(guilty):,} of {seen} above the limit")


def _survey(view: RunView) -> dict[Parameter, _GradientHistory]:
    """The scaled FP16 weight gradients, with the zeros that unscaling added; steps that clip or skip are left out."""
    plain = {(p, s.step) for p, steps in view.timeline.items() for s in steps if not s.skipped and s.clip_norm is None}
    kinds = ("weight_grad", "weight_grad_step")
    where = [("dtype", "in", ("float16", "float32"))]
    rows = view.measured((), kinds, columns=_COLUMNS, steps=watched_steps(view), where=where)
    accumulated = rows["kind"] == "weight_grad"
    relevant = ((rows["scale"] > 1.0) == accumulated) & (~accumulated | (rows["dtype"] == "float16"))
    before, after = pairs(rows[relevant & finite(rows) & on_steps(rows, plain)], *kinds)
    zero = column(before, "zero")
    shares = np.maximum(column(after, "zero") - zero, 0.0) / np.maximum(column(before, "numel") - zero, 1.0)
    ids = groups(before, PARAMETER)
    first, worst = before.iloc[firsts(ids)], before.iloc[[indices[0] for indices in rows_of(ids, -shares)]]
    columns = zip(first["numel"], pd.Series(shares).groupby(ids).median(), np.bincount(ids).tolist(), at(worst),
                    strict=True)  # fmt: skip
    return {place: _GradientHistory(*values) for place, values in zip(parameters(first), columns, strict=True)}


def _rows(view: RunView, place: Parameter, gradient: _GradientHistory) -> tuple[TensorRow, TensorRow]:
    """A weight's gradient before and after unscaling, at its worst step."""
    by_kind = {r.kind: r for r in view.rows(*gradient.worst) if r.owner == place}
    return by_kind["weight_grad"], by_kind["weight_grad_step"]


def _flushed_by_half(row: TensorRow, unscaled: TensorRow) -> bool:
    """Whether FP16 flushed the gradient: it is FP16 now, or its FP32 values look as if they came from FP16.

    They do if none of them is below FP16's smallest number, and no more zeros are new than FP16 flushes.

    Args:
        row: the gradient before unscaling.
        unscaled: the gradient that the optimizer got.
    """
    flushed = row.histogram.flushed(FP16, 1.0 / (row.scale or 1.0)).high
    least = unscaled.amin_nonzero or FP16.min_subnormal
    return unscaled.dtype == "float16" or (least >= FP16.min_subnormal and unscaled.zero - row.zero <= flushed)


def _lost_share(row: TensorRow) -> float:
    """Share of the gradient's magnitude in elements that FP16 flushes if they are divided by the loss scale."""
    limit = FP16.flush_limit * (row.scale or 1.0)
    total, kept = magnitude(row.histogram), magnitude(row.histogram[round(math.log2(limit)) :])
    return 1.0 - kept / total if total else 0.0


def _finding(view: RunView, guilty: Mapping[Parameter, _GradientHistory], options: Options) -> Finding:
    place, gradient = max(guilty.items(), key=lambda item: (item[1].share, item[1].numel))
    process, step = gradient.worst
    row, unscaled = _rows(view, place, gradient)
    lost, scale = _lost_share(row), row.scale or 1.0
    few = gradient.steps < 4
    return RULE.finding(
        severity=Severity.ERROR if gradient.share >= options["error_share"] else Severity.WARNING,
        confidence=0.75 if few else 0.9,
        title=f"{percent(gradient.share)} of the gradient of `{row.parameter}` is flushed by unscaling it in FP16",
        message=f"The division by the loss scale, {scale:g}, in float16 set {percent(gradient.share)} of the non-zero "
        f"gradient of `{row.parameter}` to zero, in the median of {plural(gradient.steps, 'step')} (limit "
        f"{percent(options['flushed_share'])}). It removed {percent(lost)} of the magnitude: amax "
        f"{row.amax or 0.0:.3g} before, {unscaled.amax or 0.0:.3g} after; FP16 flushes up to {FP16.flush_limit:.3g}. "
        f"{plural(len(guilty), 'gradient')} above the limit.",
        location=location(unscaled, Phase.OPTIMIZER, process, step),
        evidence={
            "flushed_share": gradient.share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": lost,
            "loss_scale": scale,
            "tensors": [
                {"root": p[0], "parameter": dotted(*p[1:]), "flushed_share": g.share}
                for p, g in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]
            ],
            "range": range_evidence(unscaled),
            "path": path_evidence([row, unscaled]),
            "confidence_reason": "fewer than four steps were recorded" if few else "zeros before and after are counted",
        },
        prescription=Prescription(
            title=f"FP32 weights, FP16 autocast and GradScaler: flushed {percent(gradient.share)} -> 0 %",
            change={"weight_dtype": {"from": "float16", "to": "float32"}, "unscale_in": "float32"},
            predicted={"flushed_share": {"from": gradient.share, "to": 0.0}},
            snippet="model = model.float()  # before the optimizer is made\n"
            + snippets.grad_scaler(view.device, scale),
        ),
    )


RULE = Rule(
    code="PD308",
    name="unscaled-into-half",
    severity=Severity.ERROR,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        fraction("flushed_share", 0.04, "Non-zero elements that unscaling sets to zero, median over steps.",
                 "As in PD201."),
        fraction("error_share", 0.2, "Share from which the finding is an error, not a warning.", "As in PD201."),
    ),
    explains=when(anywhere, "PD510"),
    check=check,
    newer_half=True,
)  # fmt: skip
