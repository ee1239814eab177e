"""PD201: activation gradients are rounded to zero."""

from __future__ import annotations

from collections.abc import Mapping

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.flushing_ops import check_flushes
from precdoctor.diagnosis.survey.gradient_underflow import (
    FLUSH_OPTIONS,
    GradientSeries,
    Survey,
    is_harmed,
    lost_channels,
    plan,
    prescribe,
    survey,
    tail_of,
)
from precdoctor.diagnosis.survey.rows import Key, TensorRow, path_evidence, range_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format

PAGE = RulePage(
    finds="""
Gradients of module outputs in FP16 or BF16 of which a large share was rounded to zero. A tensor that is already in the
narrow format shows only its zeros, and most zeros are structural: ReLU, dropout, padding, untouched rows. They are told
apart by the mark underflow leaves. Estimator: the exponents of the surviving elements in the ten binades above the
format's flush limit (half the smallest subnormal: 2^-25 in FP16, 2^-134 in BF16) are matched by likelihood with a
family of distributions (Gaussians of unequal scales, Laplace, Student, log-normals), rounding to subnormal steps
included; the median of what fits says how many elements lie below the limit, and never more than there are zeros. A
tensor whose survivors stay clear of the limit has a flushed share of 0 whatever its zeros.

A tensor counts when, in the median over the steps, its flushed share (flushed / (flushed + non-zero)) exceeds its
limit, and so does the share of its total magnitude that was lost. Gradients in which a few elements carry everything,
such as the logits of a confident classifier, lose little magnitude. They are spared only if the gradient of the
module's weight has no more zeros than other reasons explain: channels that are flushed on every sample leave zeros
there, scattered elements leave none. A tensor that is zero throughout counts only when the gradient before it in the
backward pass was dying already.

Where no such tensor is found, an op of the backward pass counts that was seen to flush most of a gradient (half of its
non-zero elements and a quarter of its magnitude, on two scanned steps or more, see `record --deep-scan`): the cast
behind the loss, for instance, in front of which no module is.
""",
    matters="""
A flushed gradient does not train. Layers far from the loss go first; the loss goes down more slowly or stops, and
nothing is ever NaN.
""",
    example="""
FP16 autocast without a loss scaler. Gradients of a mean over batch, height and width are 1e-7 and smaller; FP16 rounds
everything up to 2^-25 = 3e-8 to zero.

    loss.backward()                 # 41 % of conv1's output gradient flushed
    scaler.scale(loss).backward()   # 0.3 %
""",
    remedy="""
Scale the loss by the power of two in the finding: it is the smallest that brings the flushed share of the worst tensor
to a tenth of the limit, or the largest that leaves `margin_binades` below overflow on every recorded step. Use
`GradScaler` so that overflows are skipped. BF16 needs no scaling.
""",
    confidence="""
0.9; 0.7 when fewer than four steps were sampled or the worst tensor is zero throughout; 0.6 below 1,000 surviving
elements. The estimator is within a fifth of the truth for shapes of its family, within a factor of 1.7 for others, and
underestimates densities with a peak at zero, such as products of random variables, by up to a factor of 5; a false
alarm is the worse error. tests/unit/numerics/test_tail.py holds it to that.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "NVIDIA BioNeMo framework, published gradient-underflow bands 0.5 / 2 / 4 %",
        "IEEE 754-2019, section 7.5 (underflow)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the worst tensor, with all others above the limits as evidence."""
    found = survey(view, max_steps=options["max_steps"], dying_share=options["flushed_share"])
    flushes = check_flushes(view)
    if not found.tensors:
        if flushes.findings:
            return flushes
        return Checked.not_applicable("no output gradient is in FP16 or BF16")
    seen = f"{plural(len(found.tensors), 'output gradient')} on {plural(len(found.steps), 'step')}"
    limits = options["flushed_share"], options["lost_magnitude"]
    guilty = {k: t for k, t in found.tensors.items() if is_harmed(view, k, t, limits)}
    if not guilty and flushes.findings:
        return flushes
    if not guilty:
        worst = max(t.share for t in found.tensors.values())
        tail = ", a tail: no recorded weight gradient misses a channel" if worst >= limits[0] else ""
        return Checked((), f"{seen}: {percent(worst)} flushed in the worst (limit {percent(limits[0])}){tail}")
    finding = _finding(view, found, guilty, options)
    return Checked(
        [finding],
        f"{plural(len(guilty), 'gradient')} of {seen} above {percent(options['flushed_share'])}",
        Status.FAILED,
    )


# -- telling ----------------------------------------------------------------------------------------------------------


def _finding(view: RunView, found: Survey, guilty: Mapping[Key, GradientSeries], options: Options) -> Finding:
    key, tensor = max(guilty.items(), key=lambda item: (not item[1].dead, item[1].share))
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    facts = view.step_facts(process, step)
    current = (row.scale or (facts.loss_scale if facts is not None else None)) or 1.0
    chosen = plan(view, found, guilty, target=options["flushed_share"] / 10.0, margin=options["margin_binades"])
    lost, limit = percent(tensor.lost_share), percent(options["lost_magnitude"])
    message = (
        f"{percent(tensor.share)} of the gradient of the output of `{row.place}` ({row.dtype}) was rounded to zero in "
        f"the median of {plural(len(tensor.shares), 'step')} (limit {percent(options['flushed_share'])}), {lost} of "
        f"its magnitude (limit {limit}). {_channel_words(view, key, tensor)}{_range_words(row, tensor.fmt)} "
        f"Loss scale: {current:g}. {plural(len(guilty), 'gradient')} of {len(found.tensors):,} above the limits."
    )
    severe = tensor.share >= options["error_share"]
    known = [r for r in rows if r.kind in ("loss", "grad_output") and r.order is not None]
    path = [r for r in known if r.position <= row.position]
    evidence = {
        "flushed_share": tensor.share,
        "limit": options["flushed_share"],
        "lost_magnitude_share": tensor.lost_share,
        "lost_channel_share": lost_channels(view, key, tensor),
        "structural_zero_share": max(0.0, row.zero - tail_of(row, tensor.fmt).total) / row.numel,
        "subnormal_share": row.subnormal / row.numel,
        "loss_scale": current,
        "steps_examined": len(found.steps),
        "tensors": [
            {"root": k[0], "module": k[1], "flushed_share": t.share, "lost_magnitude_share": t.lost_share}
            for k, t in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]
        ],
        "range": range_evidence(row),
        "path": path_evidence(path),
        "confidence_reason": _confidence(tensor, row, found)[1],
    }
    return Finding(
        code="PD201",
        name="activation-gradient-underflow",
        severity=Severity.ERROR if severe else Severity.WARNING,
        confidence=_confidence(tensor, row, found)[0],
        title=f"{percent(tensor.share)} of the gradient of `{row.place}` is flushed to zero in {tensor.fmt.name}",
        message=message,
        location=Location(row.root, row.module, row.module_class or None, row.kind, Phase.BACKWARD, process.rank, step),
        evidence=evidence,
        prescriptions=(prescribe(view, tensor.fmt, current, chosen),),
    )


def _channel_words(view: RunView, key: Key, tensor: GradientSeries) -> str:
    lost = lost_channels(view, key, tensor)
    return f"{percent(lost)} of the module's weight gradient is exactly zero because of it. " if lost else ""


def _range_words(row: TensorRow, fmt: Format) -> str:
    limit = f"{fmt.name} flushes up to {fmt.flush_limit:.3g}"
    if row.amax:
        return f"Its largest element is {row.amax:.3g}; {limit}."
    return f"Nothing of it survived; {limit}."


def _confidence(tensor: GradientSeries, row: TensorRow, found: Survey) -> tuple[float, str]:
    if row.numel - row.zero < 1000 and not tensor.dead:
        return 0.6, "fewer than 1,000 elements survive"
    if tensor.dead:
        return 0.7, "the tensor is zero throughout; the gradient before it was dying"
    if len(found.steps) < 4:
        return 0.7, "fewer than four steps were sampled"
    return 0.9, "the survivors pile up at the flush limit as the zeros continue them"


RULE = Rule(
    code="PD201",
    name="activation-gradient-underflow",
    severity=Severity.ERROR,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=FLUSH_OPTIONS,
    explains=when(anywhere, "PD202", "PD203", "PD204", "PD303", "PD305"),
    check=check,
)
