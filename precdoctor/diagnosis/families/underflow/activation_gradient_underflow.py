"""PD201: activation gradients are rounded to zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from precdoctor.diagnosis.advice.larger_loss_scale import loss_scale_of, plan_scale, prescribe_scale
from precdoctor.diagnosis.analyses.gradient_underflow import (
    FLUSH_OPTIONS,
    SUBNORMAL_SHARE,
    GradientSeries,
    GradientSurvey,
    flush_confidence,
    is_harmed,
    lost_channels,
    survey,
    tail_of,
)
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import Key, TensorRow, gradient_evidence, known_format, location, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format

PAGE = RulePage(
    finds="""
Gradients of module outputs in FP16 or BF16 with a large share rounded to zero. A tensor that is already in the narrow
format shows only its zeros, and most zeros are structural: ReLU, dropout, padding, untouched rows. Flushed elements
are recognised by the mark that underflow leaves. Estimator: the rule takes the exponents of the surviving elements in
the ten binades above the format's flush limit (half the smallest subnormal: 2^-25 in FP16, 2^-134 in BF16). It matches
them by likelihood with a family of distributions (Gaussians of unequal scales, Laplace, Student, log-normals), rounding
to subnormal steps included. The median of the distributions that fit estimates how many elements lie below the limit;
there are never more than there are zeros. If the survivors stay clear of the limit, the flushed share is 0, however
many zeros there are.

A tensor counts if its flushed share (flushed / (flushed + non-zero)) exceeds its limit in the median over the steps,
and so does the flushed share of its total magnitude. Gradients in which a few elements carry everything, such as the
logits of a confident classifier, lose little magnitude. They are exempt unless the gradient of the module's weight has
more zeros than other reasons explain: a channel that is flushed on every sample leaves zeros there, scattered elements
leave none. A tensor that is zero throughout counts only if the gradient before it in the backward pass was already
dying. The finding names the gradient that lost the largest share of its elements and survives. Where gradients vanish
at once (some are zero throughout, and no other lost `error_share` of its elements), it names the first of zeros only.

If no such tensor is found, deep scans are asked (see `record --deep-scan`): an op of the backward pass counts if it
flushed half of the non-zero elements and an eighth of the magnitude of a gradient, on at least two scanned steps. The
cast behind the loss, for instance, precedes every module.
""",
    matters="""
A flushed gradient does not train. Layers far from the loss go first; the loss falls more slowly or stops falling, and
nothing is ever NaN.
""",
    example="""
FP16 autocast without a loss scaler. Gradients of a mean over batch, height and width are 1e-7 and smaller; FP16 rounds
everything up to 2^-25 = 3e-8 to zero.

    loss.backward()                 # 41 % of conv1's output gradient flushed
    scaler.scale(loss).backward()   # 0.3 %
""",
    remedy="""
Scale the loss by the power of two in the finding. It is the smallest that brings the flushed share of the worst tensor
to a tenth of the limit, and the subnormal share to a tenth of PD303's. If no scale does both, it is the smallest for
the flushed share alone, or else the largest that leaves `margin_binades` below overflow on every recorded step. Use
`GradScaler`, which skips steps that overflow. BF16 needs no scaling.
""",
    confidence="""
0.9; 0.7 if fewer than four steps were sampled or the worst tensor is zero throughout; 0.6 below 1,000 surviving
elements. The estimator is within a fifth of the truth for shapes of its family and within a factor of 1.7 for others.
It underestimates densities with a peak at zero, such as products of random variables, by up to a factor of 5, because
a false alarm is the worse error. tests/unit/numerics/test_tail.py holds it to that.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "NVIDIA BioNeMo framework, published gradient-underflow bands 0.5 / 2 / 4 %",
        "IEEE 754-2019, section 7.5 (underflow)",
    ),
)
#: Minimum share of the non-zero elements, and of the magnitude, that a scanned op flushes. The smaller half of a
#: Gaussian's elements holds a fifth of its magnitude; if a few elements carry everything, far less than an eighth.
_OP_FLUSHED, _OP_LOST = 0.5, 0.125


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the worst tensor, with all others above the limits as evidence; else a scanned op."""
    gradients = survey(view, max_steps=options["max_steps"], dying_share=options["flushed_share"])
    flushes = _check_ops(view)
    if not gradients.tensors:
        return flushes if flushes.findings else Checked.not_applicable("no output gradient is in FP16 or BF16")
    seen = f"{plural(len(gradients.tensors), 'output gradient')} on {plural(len(gradients.steps), 'step')}"
    limits = options["flushed_share"], options["lost_magnitude"]
    if guilty := {k: t for k, t in gradients.tensors.items() if is_harmed(view, k, t, limits)}:
        reason = f"{plural(len(guilty), 'gradient')} of {seen} above {percent(options['flushed_share'])}"
        return Checked([_finding(view, gradients, guilty, options)], reason)
    if flushes.findings:
        return flushes
    worst = max(t.share for t in gradients.tensors.values())
    tail = ", a tail: no recorded weight gradient misses a channel" if worst >= limits[0] else ""
    return Checked((), f"{seen}: {percent(worst)} flushed in the worst (limit {percent(limits[0])}){tail}")


def _finding(view: RunView, found: GradientSurvey, guilty: Mapping[Key, GradientSeries], options: Options) -> Finding:
    key, tensor = _most_lost(view, guilty, options["error_share"])
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    current = loss_scale_of(view, row)
    chosen = plan_scale(
        view,
        found,
        guilty,
        target=options["flushed_share"] / 10.0,
        margin=options["margin_binades"],
        subnormal=SUBNORMAL_SHARE.default / 10.0,  # otherwise PD303 fires on a run with the prescribed scale
    )
    channels = lost_channels(view, key, tensor)
    left = f"It leaves {percent(channels)} of the module's weight gradient exactly zero. " if channels else ""
    confidence, why = flush_confidence(row, len(found.steps))
    if tensor.dead:
        confidence, why = 0.7, "the tensor is zero throughout; the gradient before it was dying"
    return RULE.finding(
        severity=Severity.ERROR if tensor.share >= options["error_share"] else Severity.WARNING,
        confidence=confidence,
        title=f"{percent(tensor.share)} of the gradient of `{row.place}` is flushed to zero in {tensor.fmt.name}",
        message=f"Rounding to {row.dtype} set {percent(tensor.share)} of the gradient of the output of `{row.place}` "
        f"to zero, in the median of {plural(tensor.steps, 'step')} (limit {percent(options['flushed_share'])}). It "
        f"removed {percent(tensor.lost_share)} of the magnitude (limit {percent(options['lost_magnitude'])}). "
        f"{left}{_range_words(row, tensor.fmt)} Loss scale: {current:g}. "
        f"{plural(len(guilty), 'gradient')} of {len(found.tensors):,} above the limits.",
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            "flushed_share": tensor.share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": tensor.lost_share,
            "lost_channel_share": channels,
            "structural_zero_share": max(0.0, row.zero - tail_of(row, tensor.fmt).total) / row.numel,
            "subnormal_share": row.subnormal / row.numel,
            "loss_scale": current,
            "steps_examined": len(found.steps),
            "tensors": [
                {"root": k[0], "module": k[1], "flushed_share": t.share, "lost_magnitude_share": t.lost_share}
                for k, t in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]
            ],
            **gradient_evidence(rows, row),
            "confidence_reason": why,
        },
        prescription=prescribe_scale(view, tensor.fmt, current, chosen),
    )


def _most_lost(view: RunView, guilty: Mapping[Key, GradientSeries], grave: float) -> tuple[Key, GradientSeries]:
    """Return the gradient that lost most and survives; where gradients vanish at once, the first of zeros only.

    They vanish at once if none lost the share ``grave`` of its elements or more without losing all.
    """
    gone = {k: t for k, t in guilty.items() if t.dead and t.share >= 1.0}
    if not gone or any(grave <= t.share < 1.0 for t in guilty.values()):
        return max(guilty.items(), key=lambda item: (not item[1].dead, item[1].share))
    order = {r.key: r.position for r in view.rows(*next(iter(gone.values())).worst)}
    return min(gone.items(), key=lambda item: order.get(item[0], math.inf))


def _range_words(row: TensorRow, fmt: Format) -> str:
    limit = f"{fmt.name} flushes up to {fmt.flush_limit:.3g}"
    return f"Its largest element is {row.amax:.3g}; {limit}." if row.amax else f"No element survived; {limit}."


def _check_ops(view: RunView) -> Checked:
    """At most one finding: the scanned op of the backward pass that flushed most of a gradient's magnitude."""

    def guilty(fact: Fact) -> float:
        """The share of the magnitude that the op flushed; 0 below the limits."""
        flushed = fact.share("flushed", "of") >= _OP_FLUSHED
        return fact.number("lost") if flushed and fact.number("lost") >= _OP_LOST else 0.0

    found = check_facts(
        view, ("flush",), guilty, lambda g: _op_finding(view, g), seen="no gradient that was flushed",
        keep=lambda g: len(g.steps) > 1,
    )  # fmt: skip
    return Checked(tuple(found.findings)[:1], found.reason, found.status)


def _op_finding(view: RunView, group: Group) -> Finding:
    fact = group.worst
    flushed, of, zero = fact.count("flushed"), fact.count("of"), fact.count("zero_gradients")
    fmt = known_format(text(fact.data.get("dtype")))
    smallest = fmt.min_normal if fmt is not None else 0.0
    exponent = max(1, math.ceil(math.log2(smallest / max(fact.number("exact_median"), 1e-300))))
    listed = fact.data.get("zero_gradients_of")
    dead = [text(name) for name in listed] if isinstance(listed, list) else []
    names = ", ".join(f"`{n}`" for n in dead[:3])
    return RULE.finding(
        severity=Severity.ERROR if zero else Severity.WARNING,
        confidence=0.9,
        title=f"{percent(fact.share('flushed', 'of'))} of a gradient is flushed to zero by {fact.short} "
        f"{fact.place_words}{fact.line}",
        message=f"At step {fact.step}, {fact.op}{fact.line} {fact.place_words} returned zeros for {flushed:,} of "
        f"{of:,} elements that are not zero in FP64 (limit {percent(_OP_FLUSHED)}). They hold "
        f"{percent(fact.number('lost'))} of the gradient's magnitude (limit {percent(_OP_LOST)}); "
        f"{percent(fact.number('channels'))} of the channels are zero throughout. Their exact values reach "
        f"{fact.number('exact_amax'):.3g}. Weights whose gradient is exactly zero: "
        f"{zero}{f' ({names})' if names else ''}.{group.elsewhere_words}",
        location=_op_location(view, group, dead),
        evidence=group.evidence(
            {"flushed_share": _OP_FLUSHED, "lost_magnitude": _OP_LOST},
            "the op's zeros were compared with FP64 results from the same operands",
        ),
        prescription=Prescription(
            title=f"loss scale 2^{exponent}: the median of the flushed gradient becomes a normal number; "
            f"flushed elements {flushed:,} -> at most {of // 2:,}",
            change={"loss_scale": 2.0**exponent},
            predicted={"flushed_elements": {"from": flushed, "to": of // 2}},
            snippet=f"scaler = torch.amp.GradScaler(init_scale=2.0**{exponent})\n",
        ),
    )


def _op_location(view: RunView, group: Group, dead: list[str]) -> Location:
    """Where the op ran; for an op outside all modules, the last layer whose weight gradient is zero."""
    place = group.location
    if place.module or not dead or len(view.models) != 1:
        return place
    return replace(place, root=next(iter(view.models)), module=dead[-1].rpartition(".")[0])


RULE = Rule(
    code="PD201",
    name="activation-gradient-underflow",
    severity=Severity.ERROR,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=FLUSH_OPTIONS,
    explains=when(anywhere, "PD202", "PD203", "PD204", "PD303", "PD305"),
    check=check,
    newer_half=True,
)
