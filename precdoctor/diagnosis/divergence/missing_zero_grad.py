"""A missing ``zero_grad()``: the backward pass adds to gradients that the step before has already applied.

From the recorder's ``kept-gradients`` warnings; the finding of PD603 and the prescription are made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.analyses.parameters import parameter_label, recorded_parameters
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import named, percent, plural
from precdoctor.diagnosis.survey.rows import Parameter, integer, text
from precdoctor.diagnosis.survey.step_facts import StepFacts, norms_of
from precdoctor.diagnosis.survey.view import Process, RunView


@dataclass(frozen=True)
class Unzeroed:
    """Successive steps without ``zero_grad()``.

    Attributes:
        process, root, optimizer: the process, model and optimizer of the gradients.
        since: the step with the oldest gradients in the sum.
        last: the last step that applied the sum.
        steps: number of steps without ``zero_grad()``.
        summed: number of backward passes in the sum at the end.
        kept, of: number of gradients that were not zeroed; number of all gradients.
    """

    process: Process
    root: str | None
    optimizer: str
    since: int
    last: int
    steps: int
    summed: int
    kept: int
    of: int


def unzeroed(view: RunView, least: float) -> Unzeroed | None:
    """Return the longest stretch without ``zero_grad()``; None if none has at least ``least`` steps.

    The recorder writes one event as soon as the fault is certain, and one with the final counts; a run that was killed
    has only the first.
    """
    found = []
    for process, event in view.warnings_about("kept-gradients"):
        data = event["data"]
        counts = [integer(data.get(name)) for name in ("since", "steps", "summed", "kept", "of")]
        if None in counts:
            continue
        since, steps, summed, kept, of = (c or 0 for c in counts)
        name, last = text(data.get("optimizer")), integer(event.get("step")) or 0
        found.append(Unzeroed(process, text(event.get("root")) or None, name, since, last, steps, summed, kept, of))
    longest = max(found, key=lambda u: (u.steps, -u.process.rank), default=None)
    return longest if longest is not None and longest.steps >= least else None


def finding(rule: Rule, view: RunView, found: Unzeroed, limit: float, exploded: Finding | None) -> Finding:
    """Return the finding of ``rule`` for a missing ``zero_grad()``.

    Args:
        limit: fewest steps that are reported.
        exploded: the finding for the gradient that exploded because of it, if any.
    """
    steps = [s for s in by_optimizer(view).get((found.process, found.optimizer), ()) if s.complete]
    never = found.steps >= len(steps) - 1
    norms = norms_of(_steps_inside(steps, found))
    own = _own_weights(view, found)
    whose = f" for the weights of `{found.optimizer}`" if own else ""
    rarely = f"no `zero_grad()`{whose} for {plural(found.steps, 'step')}"
    what = f"`zero_grad()` is never called{whose}" if never else rarely
    root, module = own[0][:2] if own else (found.root, "" if found.root else None)
    severities = [Severity.WARNING] if exploded is None else [Severity.WARNING, exploded.severity]
    return rule.finding(
        severity=max(severities, key=lambda s: s.weight),
        confidence=0.95,
        title=f"{what}: each step applies the sum of all gradients since step {found.since}",
        message=_message(steps, norms, found, limit)
        + (f" `{found.optimizer}` holds {named([parameter_label(p) for p in own])}." if own else "")
        + (f" {exploded.message}" if exploded is not None else ""),
        location=Location(
            root=root, module=module, phase=Phase.OPTIMIZER, step=found.since, **vars(found.process)
        ),
        cause="gradients-not-zeroed",
        evidence={
            "optimizer": found.optimizer,
            "kept_steps": found.steps,
            "limit": limit,
            "summed_passes": found.summed,
            "kept_gradients": found.kept,
            "gradients": found.of,
            "first_norm": norms[0] if norms else None,
            "last_norm": norms[-1] if norms else None,
            "last_bad_step": found.last,
            "confidence_reason": "before each backward pass the gradients were what the step before had applied",
        },
        prescription=cure(steps, found),  # clipping would not remove the cause
    )  # fmt: skip


def _own_weights(view: RunView, found: Unzeroed) -> list[Parameter]:
    """Return the weights of the optimizer, in the model's order, if another one holds others; else none."""
    names = [text(o.get("name")) for o in view.facts(found.process).get("optimizers") or ()]
    own, others = [], False
    for place, p in recorded_parameters(view, found.process):
        group = p.get("group") or (None,)
        if type(group[0]) is int and group[0] < len(names):
            is_own = names[group[0]] == found.optimizer
            own += [place] if is_own else []
            others = others or not is_own
    return own if others else []


def _steps_inside(steps: Sequence[StepFacts], found: Unzeroed) -> list[StepFacts]:
    return [s for s in steps if found.since <= s.step <= found.last]


def _message(steps: Sequence[StepFacts], norms: Sequence[float], found: Unzeroed, limit: float) -> str:
    """Return the finding's message: steps, sums, norms at both ends, and how often clipping scaled the sum."""
    whose = "the gradients" if found.kept == found.of else f"{found.kept:,} of {plural(found.of, 'gradient')}"
    message = (
        f"On {plural(found.steps, 'step')} in a row (limit {limit:g}) of {found.optimizer} the backward pass began "
        f"with {whose} as the step before had applied them, and added to them: `zero_grad()` is missing. The last of "
        f"these steps applied the sum of {plural(found.summed, 'backward pass')}"
    )
    if len(norms) > 1:
        message += f"; the gradient norm was {norms[0]:.3g} at the first one and {norms[-1]:.3g} at the last"
    inside = _steps_inside(steps, found)
    if clipped := sum(s.clip_norm is not None for s in inside):
        message += f". On {percent(clipped / len(inside))} of these steps clipping scaled old and new gradients alike"
    return message + "."


def cure(steps: Sequence[StepFacts], found: Unzeroed) -> Prescription:
    """Prescribe the missing line."""
    usual = max((s.micro_steps for s in _steps_inside(steps, found)), default=1)
    return Prescription(
        title=f"call `optimizer.zero_grad()` after each step: backward passes in a sum {found.summed} -> {usual}",
        change={"zero_grad": {"from": None, "to": "after every step"}},
        predicted={"summed_passes": {"from": found.summed, "to": usual}},
        snippet=(
            "loss.backward()\n"
            "optimizer.step()\n"
            "optimizer.zero_grad(set_to_none=True)  # else the next backward pass adds to what was applied\n"
        ),
    )
