"""PD306: gradients are clipped while they still carry the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from precdoctor.diagnosis.analyses.loss_scales import enabled_scalers
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import location
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
`clip_grad_norm_` or `clip_grad_value_` called between `scaler.scale(loss).backward()` and `scaler.step(optimizer)`
without `scaler.unscale_(optimizer)` before it, for any optimizer with clipped parameters. The recorder notes on every
step but the first whether any of the gradients still carried the scale during clipping. They do not if the script has
written to them after the backward pass: it unscales by hand (PD309 finds those that are unscaled twice).

A script without a scaler that multiplies the loss by a constant and divides the gradients after clipping does the same.
There the recorder compares two norms on sampled steps: of the gradients that the backward pass left, and of those that
the clip found.
""",
    matters="""
The limit is meant for unscaled gradients. Gradients 65,536 times as large always exceed it: a limit of 1.0 becomes
1.5e-5, and every step is cut down to that length whatever its gradient. Each time the scaler halves or doubles its
scale, the effective limit doubles or halves. SGD almost stops; Adam divides constant factors out again, which hides the
fault and disables the clipping. If a model has two optimizers and only one of them is unscaled, the scaled gradients
dominate the common norm, and clipping divides the other optimizer's gradients by the loss scale.
""",
    example="""
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clips to 1.0 / 65536
    scaler.step(optimizer)
""",
    remedy="""
Call `scaler.unscale_(optimizer)` before clipping; `scaler.step` then does not unscale a second time. With
several optimizers unscale each of them before a common norm is taken. A scale written by hand: divide before clipping.
""",
    confidence="""
0.98: the order of the two calls was observed, or the norm at the clip was measured. 0.9 if no step recorded a gradient
norm to show the effect.
""",
    references=("PyTorch documentation: Automatic Mixed Precision examples, gradient clipping",),
)


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the process with most steps that were clipped before unscaling."""
    clipped = {
        p: [s for s in steps if s.clip_norm is not None and s.clipped_before_unscale is not None]
        for p, steps in view.timeline.items()
    }
    total = sum(map(len, clipped.values()))
    if not total:
        return Checked.not_applicable("gradients were never clipped under a loss scaler")
    guilty = {p: [s for s in steps if s.clipped_before_unscale and s.loss_scale] for p, steps in clipped.items()}
    process, steps = max(guilty.items(), key=lambda item: (len(item[1]), -item[0].rank))
    share = len(steps) / len(clipped[process]) if steps else 0.0
    if share <= options["wrong_share"]:
        return Checked((), f"{plural(total, 'clipped step')}, gradients unscaled before each")
    finding = _finding(view, process, steps, share, options)
    return Checked([finding], f"{plural(len(steps), 'step')} of {total:,} clipped before unscaling")


def _shrink(facts: StepFacts, scale: float) -> float | None:
    """The factor by which clipping divides a gradient that is multiplied by ``scale``, at least 1; None if unknown."""
    if facts.grad_norm is None or not facts.clip_norm:
        return None
    return max(1.0, facts.grad_norm * scale / facts.clip_norm)


def _finding(view: RunView, process: Process, steps: Sequence[StepFacts], share: float, options: Options) -> Finding:
    first, by_hand, optimizers = steps[0], not enabled_scalers(view, process), len(view.optimizers)
    scale, limit = first.loss_scale or 1.0, first.clip_norm or 0.0
    updates = [s for s in steps if not s.skipped]
    actual = [f for s in updates if (f := _shrink(s, s.loss_scale or 1.0)) is not None]
    intended = [f for s in updates if (f := _shrink(s, 1.0)) is not None]
    noun = "sampled step" if by_hand else "step"
    message = (
        f"On {plural(len(steps), noun)} ({percent(share)} of those that clip, limit "
        f"{percent(options['wrong_share'])}) gradients were clipped to {limit:g} while they still carried the loss "
        f"scale, {scale:g} at step {first.step}. The effective limit was {limit / scale:.3g}. "
    )
    if actual:
        norm = median(s.grad_norm for s in updates if s.grad_norm is not None)
        message += (
            f"Gradients of norm {norm:.3g} (median) were divided by {median(actual):.3g}; "
            f"unscaled first, they would have been divided by {median(intended):.3g}."
        )
    if optimizers > 1:
        message += f" There are {optimizers} optimizers: unscale each one with clipped parameters first."
    harmful = bool(actual) and median(actual) > median(intended)
    return RULE.finding(
        severity=Severity.ERROR if harmful else Severity.WARNING,
        confidence=0.98 if actual else 0.9,
        title=f"gradients are clipped before unscaling: to {limit / scale:.3g}, not {limit:g}",
        message=message,
        location=location(None, Phase.OPTIMIZER, process, first.step),
        evidence={
            "clipped_scaled_share": share,
            "limit": options["wrong_share"],
            "clip_norm": limit,
            "effective_clip_norm": limit / scale,
            "loss_scale": scale,
            "median_shrink_factor": median(actual) if actual else None,
            "median_intended_shrink_factor": median(intended) if intended else None,
            "steps": len(steps),
            "last_bad_step": steps[-1].step,
            "confidence_reason": "the gradients were measured as they were clipped"
            if by_hand
            else "the order of the calls was observed",
        },
        prescription=_prescribe((limit, scale), actual, intended, _snippet(limit, scale, optimizers, by_hand=by_hand)),
    )


def _prescribe(
    clip: tuple[float, float], actual: Sequence[float], intended: Sequence[float], snippet: str
) -> Prescription:
    limit, scale = clip
    predicted: dict[str, object] = {"effective_clip_norm": {"from": limit / scale, "to": limit}}
    if actual:
        predicted["gradient_divided_by"] = {"from": median(actual), "to": median(intended)}
    return Prescription(
        title=f"unscale before clipping: effective limit {limit / scale:.3g} -> {limit:g}",
        change={"unscale_before_clip": {"from": False, "to": True}},
        predicted=predicted,
        snippet=snippet,
    )


def _snippet(limit: float, scale: float, optimizers: int, *, by_hand: bool) -> str:
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit!r})\n"
    if by_hand:
        divide = f"for p in model.parameters():\n    p.grad.div_({scale!r})\n"
        return f"import torch\n\n(loss * {scale!r}).backward()\n{divide}{clip}optimizer.step()\n"
    each = "scaler.{}(optimizer)\n"
    if optimizers > 1:
        each = "for optimizer in optimizers:\n    scaler.{}(optimizer)\n"
    return (
        "import torch\n\n"
        "scaler.scale(loss).backward()\n"
        f"{each.format('unscale_')}{clip}{each.format('step')}"
        "scaler.update()\n"
    )


RULE = Rule(
    code="PD306",
    name="clip-before-unscale",
    severity=Severity.ERROR,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        fraction("wrong_share", 0.0, "Maximum share of clipped steps that are clipped before unscaling.",
                 "None: the two orders are never equivalent."),
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
