"""PD307: a dynamic loss scaler that never updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from precdoctor.diagnosis.analyses.loss_scales import growth_interval, is_dynamic, scaled_steps
from precdoctor.diagnosis.analyses.parameters import module_of_optimizer
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import location
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A `GradScaler` whose count of clean steps stays at 0 and whose scale never changes, although steps succeed: the script
never calls `update()`, makes a new scaler on every step or epoch, or pins the scale with `update(new_scale)`. A
constant written by hand also counts, if the script skips every step because its gradients overflow.
""",
    matters="""
A dynamic scaler that does not move is a constant. It does not back off after an overflow, so every later step also
overflows and is skipped; and it never grows when gradients shrink. A scaler made anew on each step also repeats the
overflows of a fresh scaler for ever.
""",
    example="""
    for batch in batches:
        scaler = torch.amp.GradScaler("cuda")  # belongs before the loop
        ...
        scaler.step(optimizer)
        scaler.update()
""",
    remedy="""
Make one scaler before the loop, keep it in checkpoints (`scaler.state_dict()`), and call `scaler.update()` once after
every `scaler.step`. If you want a constant scale, choose a `growth_interval` longer than the run.
""",
    confidence="""
0.95 if an overflow left the scale unchanged, 0.9 otherwise: the counter is read from the scaler on every step. 0.9 for
a constant written by hand, which is inferred from the loss and the gradients.
""",
    references=("PyTorch documentation: torch.amp.GradScaler.update",),
)


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: a process whose constant scale always overflows, else one whose scaler stands still."""
    scaled = scaled_steps(view)
    for process, steps in scaled:
        if not is_dynamic(steps) and _always_overflows(steps, options):
            finding = _finding_by_hand(view, process, steps, options)
            return Checked([finding], f"all of {plural(len(steps), 'step')} overflowed")
    courses = [(p, steps) for p, steps in scaled if is_dynamic(steps)]
    if not courses:
        return Checked.not_applicable("no dynamic loss scaler was seen")
    for process, steps in courses:
        if _stands_still(view, process, steps, options):
            finding = _finding(view, process, steps, options)
            return Checked([finding], f"the scaler stood still for {plural(len(steps), 'step')}")
    longest = max(s.growth_tracker or 0 for _, steps in courses for s in steps)
    count = sum(len(steps) for _, steps in courses)
    if count < options["min_steps"] and not longest:
        return Checked.not_applicable(f"{plural(count, 'scaled step')}: too few (fewer than {options['min_steps']:g})")
    return Checked((), f"{plural(count, 'scaled step')}: the scaler counted up to {plural(longest, 'clean step')}")


def _stands_still(view: RunView, process: Process, steps: Sequence[StepFacts], options: Options) -> bool:
    """Whether neither the scale nor the scaler's count of clean steps ever changed."""
    if (growth_interval(view, process) or 0.0) <= options["shortest_interval"]:
        return False  # a scaler with an interval of 1 grows on every clean step and resets its count to 0
    changed = len({s.loss_scale for s in steps}) > 1 or any(s.growth_tracker for s in steps)
    return not changed and len(steps) >= options["min_steps"]


def _always_overflows(steps: Sequence[StepFacts], options: Options) -> bool:
    """Whether every step was skipped at one constant scale."""
    constant = len({s.loss_scale for s in steps}) == 1
    return constant and len(steps) >= options["min_steps"] and all(s.skipped for s in steps)


def _finding_by_hand(view: RunView, process: Process, steps: Sequence[StepFacts], options: Options) -> Finding:
    scale, count = steps[0].loss_scale or 0.0, plural(len(steps), "step")
    return RULE.finding(
        confidence=0.9,
        title=f"the loss scale stands still at {scale:g}, and every step overflows and is skipped",
        message=f"Over {count} (limit {options['min_steps']:g}) the script multiplied the loss by {scale:g}, the "
        "gradients held an Inf or a NaN, and the script skipped the update. Neither the weights nor the scale have "
        "changed.",
        location=location(None, Phase.OPTIMIZER, process, steps[0].step),
        evidence={
            "steps": len(steps),
            "limit": options["min_steps"],
            "loss_scale": scale,
            "clean_steps": 0,
            "overflows": len(steps),
            "last_bad_step": steps[-1].step,
            "confidence_reason": "the scale was inferred from the loss and the gradients",
        },
        prescription=Prescription(
            title=f"a scaler that backs off by itself: loss scale after an overflow {scale:g} -> {scale / 2.0:g}",
            change={"scaler_update": {"from": "never", "to": "after every step"}},
            predicted={"loss_scale_after_overflow": {"from": scale, "to": scale / 2.0}},
            snippet=_snippet(view),
        ),
    )


def _finding(view: RunView, process: Process, steps: Sequence[StepFacts], options: Options) -> Finding:
    scale = steps[0].loss_scale or 0.0
    skipped = [s for s in steps if s.skipped]
    clean = len(steps) - len(skipped)
    scalers = len(view.facts(process).get("scalers") or ())
    message = (
        f"Over {plural(len(steps), 'step')} (limit {options['min_steps']:g}) the scale stayed at {scale:g} and the "
        f"scaler's count of clean steps at 0, after {plural(clean, 'clean step')} and "
        f"{plural(len(skipped), 'overflow')}. "
    )
    message += (
        f"The script made {plural(scalers, 'scaler')}, and each starts over: make one before the loop."
        if scalers > 1
        else "The script does not call `scaler.update()`, makes a new scaler each time, or pins its scale."
    )
    if skipped:
        message += f" Overflows at steps {', '.join(str(s.step) for s in skipped[:5])} did not lower it."
    owners = {s.optimizer for s in skipped}
    root, module = module_of_optimizer(view, process, owners.pop()) if len(owners) == 1 else (None, "")
    if module:
        message += f" All are steps of the optimizer of `{module}`."
    gain = f"clean steps counted 0 -> {clean}" if clean else f"loss scale after an overflow {scale:g} -> {scale / 2:g}"
    return RULE.finding(
        severity=Severity.ERROR if skipped else Severity.WARNING,
        confidence=0.95 if skipped else 0.9,
        title=f"the loss scale stands still at {scale:g}: the scaler is never updated",
        message=message,
        location=replace(location(None, Phase.OPTIMIZER, process, steps[0].step), root=root, module=module or None),
        evidence={
            "steps": len(steps),
            "limit": options["min_steps"],
            "loss_scale": scale,
            "clean_steps_counted": 0,
            "clean_steps": clean,
            "overflows": len(skipped),
            "scalers_made": scalers,
            "last_bad_step": steps[-1].step,
            "confidence_reason": "the scaler's own counter was read on every step",
        },
        prescription=Prescription(
            title=f"one scaler, updated after every step: {gain}",
            change={"scaler_update": {"from": "never", "to": "after every step"}},
            predicted={
                "clean_steps_counted": {"from": 0, "to": clean},
                "loss_scale_after_overflow": {"from": scale, "to": scale / 2.0},
            },
            snippet=_snippet(view),
        ),
    )


def _snippet(view: RunView) -> str:
    return (
        "import torch\n\n"
        f"scaler = torch.amp.GradScaler({view.device!r})  # once, before the loop\n\n"
        "for batch in batches:\n"
        "    scaler.scale(compute_loss(model, batch)).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )


RULE = Rule(
    code="PD307",
    name="frozen-loss-scale",
    severity=Severity.ERROR,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        RuleOption("min_steps", 8.0, "steps", "Minimum number of steps without any movement.",
                   "Chosen empirically: the count of a working scaler moves after the first clean step.", 2.0),
        RuleOption("shortest_interval", 1.0, "steps", "Growth intervals up to this one are not evaluated.",
                   "At an interval of 1 the scaler resets its count on every clean step.", 1.0),
    ),
    sampled_steps=False,
    explains=when(anywhere, "PD301", "PD302", "PD303"),
    check=check,
)  # fmt: skip
