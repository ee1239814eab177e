"""PD202: weight gradients are rounded to zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.quantised_gradient import finding as coarse_finding
from precdoctor.diagnosis.families.underflow.quantised_gradient import finer, gridded
from precdoctor.diagnosis.survey.gradient_underflow import (
    FLUSH_OPTIONS,
    GradientSeries,
    Survey,
    plan,
    prescribe,
    survey,
    tail_of,
)
from precdoctor.diagnosis.survey.rows import Key, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Gradients of weights of which a large share was rounded to zero in FP16 or BF16, while the gradients of the activations
are still whole: the product of a small activation and a small gradient falls below the format, or a mean over many
rows does. Under autocast such a gradient is widened to FP32 after it was computed in FP16; it is recognised by having
no element below 2^-24. Zeros that are zero anyway (rows of an embedding nobody looked up, dead units) are told from
flushed ones as PD201 tells them: the survivors must run into the flush limit, and their shape says how many lie below.

FP32 gradients that were rounded on their way (by a hook that compresses them, in a reduction) give themselves away: all
their elements are multiples of one power of two on every step, and what came back to the layer is finer than that.
They are judged by the same limits.
""",
    matters="""
A weight whose gradient is zero gets no update from the loss; with Adam even the moments forget it. Layers with small
inputs are hit first (badly scaled features, the input of a quiet branch), and nothing is ever NaN.
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
0.9; 0.7 when fewer than four steps were sampled; 0.6 below 1,000 surviving elements. PD201's page says how good the
estimator is; it rather underestimates.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "NVIDIA BioNeMo framework, published gradient-underflow bands 0.5 / 2 / 4 %",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the worst weight gradient, with all others above the limits as evidence."""
    found = _survey(view, options)
    seen = f"{plural(len(found.tensors), 'weight gradient')} on {plural(len(found.steps), 'step')}"
    guilty = {
        k: t
        for k, t in found.tensors.items()
        if t.share >= options["flushed_share"] and t.lost_share >= options["lost_magnitude"]
    }
    if guilty:
        finding = _finding(view, found, guilty, options)
        return Checked([finding], f"{plural(len(guilty), 'gradient')} of {seen} above the limit", Status.FAILED)
    coarse = _coarse(view, options)
    if coarse is not None:
        return coarse
    if not found.tensors:
        return Checked.not_applicable("no weight gradient is stored in FP16 or BF16, or was rounded to it")
    worst = max(t.share for t in found.tensors.values())
    return Checked((), f"{seen}: {percent(worst)} flushed in the worst (limit {percent(options['flushed_share'])})")


def _coarse(view: RunView, options: Options) -> Checked | None:
    """Of FP32 gradients that lie on a grid; None where none loses too much to it."""
    limits = options["flushed_share"], options["lost_magnitude"]
    guilty = {
        k: g
        for k, g in gridded(view, options["max_steps"]).items()
        if g.share >= limits[0] and g.lost_share >= limits[1] and finer(view, k, g) is not None
    }
    if not guilty:
        return None
    finding = coarse_finding(view, guilty, limits, options["error_share"], options["margin_binades"])
    return Checked([finding], f"{plural(len(guilty), 'FP32 gradient')} rounded to a coarse grid", Status.FAILED)


def _survey(view: RunView, options: Options) -> Survey:
    return survey(
        view, max_steps=options["max_steps"], dying_share=options["flushed_share"], kind="weight_grad"
    )  # fmt: skip


def _finding(view: RunView, found: Survey, guilty: Mapping[Key, GradientSeries], options: Options) -> Finding:
    key, tensor = max(guilty.items(), key=lambda item: item[1].share)
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    facts = view.step_facts(process, step)
    current = (row.scale or (facts.loss_scale if facts is not None else None)) or 1.0
    activations = survey(view, max_steps=options["max_steps"], dying_share=options["flushed_share"])
    room = min(found.headroom, activations.headroom)
    limited = dataclasses.replace(found, headroom=room)
    chosen = plan(view, limited, guilty, target=options["flushed_share"] / 10.0, margin=options["margin_binades"])
    flushed = tail_of(row, tensor.fmt).total
    parameter = ".".join(part for part in (row.module, row.name) if part)
    structural = max(0.0, row.zero - flushed) / row.numel
    message = (
        f"{percent(tensor.share)} of the gradient of `{parameter}`, computed in {tensor.fmt.name}, was rounded to zero "
        f"in the median of {plural(len(tensor.shares), 'step')} (limit {percent(options['flushed_share'])}), "
        f"{percent(tensor.lost_share)} of its magnitude (limit {percent(options['lost_magnitude'])}); a further "
        f"{percent(structural)} of it is zero for other reasons. What is left reaches {row.amax or 0.0:.3g}; "
        f"{tensor.fmt.name} flushes up to {tensor.fmt.flush_limit:.3g}. Loss scale: {current:g}. "
        f"{plural(len(guilty), 'gradient')} of {len(found.tensors):,} above the limits."
    )
    made = next((r for r in rows if r.kind == "grad_output" and r.key[:2] == key[:2] and r.amax), None)
    if made is not None:
        message += f" The gradient of the module's output reaches {made.amax:.3g}, so its input is what is small."
    confidence, why = _confidence(tensor, row.numel - row.zero, len(found.steps))
    return Finding(
        code="PD202",
        name="weight-gradient-underflow",
        severity=Severity.ERROR if tensor.share >= options["error_share"] else Severity.WARNING,
        confidence=confidence,
        title=f"{percent(tensor.share)} of the gradient of `{parameter}` is flushed to zero in {tensor.fmt.name}",
        message=message,
        location=Location(row.root, row.module, row.module_class or None, row.kind, Phase.BACKWARD, process.rank, step),
        evidence={
            "flushed_share": tensor.share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": tensor.lost_share,
            "structural_zero_share": structural,
            "computed_in": tensor.fmt.dtype,
            "loss_scale": current,
            "steps_examined": len(found.steps),
            "tensors": [
                {"root": k[0], "parameter": f"{k[1]}.{k[3]}".strip("."), "flushed_share": t.share}
                for k, t in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]
            ],
            "range": range_evidence(row),
            "path": path_evidence(path_to([r for r in rows if r.kind in ("loss", "grad_output")], row)),
            "confidence_reason": why,
        },
        prescriptions=(prescribe(view, tensor.fmt, current, chosen),),
    )


def _confidence(tensor: GradientSeries, alive: int, steps: int) -> tuple[float, str]:
    if alive < 1000:
        return 0.6, "fewer than 1,000 elements survive"
    if len(tensor.shares) < 4 or steps < 4:
        return 0.7, "fewer than four steps were sampled"
    return 0.9, "the survivors pile up at the flush limit as the zeros continue them"


RULE = Rule(
    code="PD202",
    name="weight-gradient-underflow",
    severity=Severity.ERROR,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=FLUSH_OPTIONS,
    explains=when(anywhere, "PD203", "PD303", "PD305"),
    check=check,
    step_columns=("autocast_dtype",),
)
