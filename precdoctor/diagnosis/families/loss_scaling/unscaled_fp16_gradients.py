"""PD305: FP16 gradients without a loss scale, in FP16's subnormal range."""

from __future__ import annotations

from collections.abc import Mapping

from precdoctor.diagnosis.advice.larger_loss_scale import out_of_subnormals, subnormal_share
from precdoctor.diagnosis.analyses.gradient_underflow import GradientSeries, GradientSurvey, is_faint, survey
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.scale_level import SUBNORMAL_OPTIONS, subnormal_evidence
from precdoctor.diagnosis.survey.rows import Key, gradient_evidence, location
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16

PAGE = RulePage(
    finds="""
A run with an FP16 backward pass and no loss scale (no `GradScaler`, none written by hand), so that gradients lie among
FP16's subnormals: below 2^-14 = 6.1e-5 each binade costs one more of the 11 significant bits, until 2^-25 is zero. A
gradient counts if its elements keep fewer than `fine_bits` significant bits on average: BF16 has no more than 8. Below
`enough_bits` the finding is a warning, otherwise information. If elements are lost altogether, PD201 or PD202 reports
it and includes this finding.
""",
    matters="""
Activation gradients of common networks lie between 1e-9 and 1e-4. Without a scale they sit on the floor of FP16's
range, and the rest of it stays empty. First they lose bits; as the loss falls, they are flushed and layers stop
training.
""",
    example="""
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    loss.backward()                 # half of the gradient is subnormal
    scaler.scale(loss).backward()   # none
""",
    remedy="""
Use `torch.amp.GradScaler`, which finds the scale by itself; the finding names the scale that lifts the worst gradient
out of the subnormal range. BF16 needs no scaling at all.
""",
    confidence="""
0.9: subnormal elements are counted exactly. 0.7 if fewer than four steps were sampled.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2 and figure 3",
        "PyTorch documentation: Automatic Mixed Precision, gradient scaling",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the gradient that keeps the fewest significant bits."""
    if any(s.loss_scale is not None for steps in view.timeline.values() for s in steps):
        return Checked.not_applicable("a loss scale is in force")
    gradients = survey(view, max_steps=options["max_steps"], dying_share=options["dying_share"])
    fp16 = {k: t for k, t in gradients.tensors.items() if t.fmt is FP16}
    if not fp16:
        return Checked.not_applicable("no output gradient is in FP16")
    faint = {k: t for k, t in fp16.items() if is_faint(view, k, t, options["faint_share"], options["enough_bits"])}
    if not faint:
        reason = f"{plural(len(fp16), 'FP16 gradient')}: few elements carry them, and weight gradients are whole"
        return Checked((), reason)
    limit = options["subnormal_share"]
    guilty = {k: t for k, t in faint.items() if t.subnormal_share >= limit and t.mean_bits < options["fine_bits"]}
    if not guilty:
        worst = max(faint.values(), key=lambda t: t.subnormal_share)
        words = f"{percent(worst.subnormal_share)} subnormal (limit {percent(limit)}), {worst.mean_bits:.1f} bits kept"
        return Checked((), f"{plural(len(faint), 'FP16 gradient')} without a loss scale: {words} in the worst")
    key, worst = min(guilty.items(), key=lambda item: item[1].mean_bits)
    seen = f"{plural(len(faint), 'FP16 gradient')} without a loss scale: {worst.mean_bits:.1f} bits kept in the worst"
    return Checked([_finding(view, gradients, key, guilty, options)], seen)


def _finding(
    view: RunView, found: GradientSurvey, key: Key, guilty: Mapping[Key, GradientSeries], options: Options
) -> Finding:
    tensor = guilty[key]
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    exponent, after = out_of_subnormals(
        row, found.headroom - options["margin_binades"], target=options["subnormal_share"] / 10.0
    )
    bits = tensor.mean_bits
    return RULE.finding(
        severity=None if bits < options["enough_bits"] else Severity.INFO,
        confidence=0.7 if tensor.steps < 4 else 0.9,
        title=f"FP16 without a loss scale: {percent(tensor.subnormal_share)} of the gradient of `{row.place}` is "
        "subnormal",
        message=f"No loss scale is in force. {percent(tensor.subnormal_share)} of the gradient of the output of "
        f"`{row.place}` (float16) is subnormal in the median of {plural(tensor.steps, 'step')} (limit "
        f"{percent(options['subnormal_share'])}). Its non-zero elements keep {bits:.1f} of 11 significant bits on "
        f"average (limit {options['fine_bits']:g}). Its largest element is {row.amax or 0.0:.3g}; {found.headroom:.1f} "
        f"binades above the largest gradient of the run are unused. {plural(len(guilty), 'gradient')} of "
        f"{len(found.tensors):,} above the limit.",
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            **subnormal_evidence(tensor, guilty, options),
            "headroom_binades": found.headroom,
            "steps_examined": len(found.steps),
            **gradient_evidence(rows, row),
        },
        prescription=Prescription(
            title=f"GradScaler at 2^{exponent}: subnormal {percent(subnormal_share(row, 0))} -> {percent(after)}",
            change={"loss_scale": {"from": 1.0, "to": 2.0**exponent}},
            predicted={
                "subnormal_share": {"from": subnormal_share(row, 0), "to": after},
                "headroom_binades": {"from": round(found.headroom, 1), "to": round(found.headroom - exponent, 1)},
            },
            snippet=snippets.grad_scaler(view.device, 2.0**exponent),
        ),
    )


RULE = Rule(
    code="PD305",
    name="unscaled-fp16-gradients",
    severity=Severity.WARNING,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=SUBNORMAL_OPTIONS,
    check=check,
    newer_half=True,
)  # fmt: skip
