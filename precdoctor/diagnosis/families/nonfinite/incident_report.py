"""How incidents are told: the evidence, location and status lines that the PD1xx rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence.onset import divergence_before
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident, incidents
from precdoctor.diagnosis.survey.rows import TensorRow, known_format, path_evidence, range_evidence
from precdoctor.diagnosis.survey.view import RunView

#: Occurrences listed by number before "and N more".
_LISTED = 16
#: Backward passes behind the last optimizer step, in those of a usual step, that are no accumulation any more.
_LATER_PASSES = 4
#: Confidence of a finding that leads with what threw the run off, steps before.
_ROOTED = 0.85
#: Binades beyond a format's end up to which the format is the fault, not the size of the numbers. Chosen empirically.
_BEYOND = 2.0
#: Origins inferred from the tensors on both sides of code that no hook sees.
_INFERRED = ("functional", "between-roots", "loss-backward", "between")


def confidence_options(certain: float) -> tuple[RuleOption, ...]:
    """The options all PD1xx rules share, with this rule's own base confidence."""
    return (
        RuleOption(
            "confidence",
            certain,
            "fraction",
            "Confidence of a finding whose step is fully recorded.",
            "Precdoctor's own: what remains is a producer outside any recorded tensor.",
            maximum=1.0,
        ),
        RuleOption(
            "unrecorded_confidence",
            0.5,
            "fraction",
            "Confidence when the step's tensors are not in the log.",
            "Precdoctor's own: the non-finite value is certain, its origin is not.",
            maximum=1.0,
        ),
    )


def resume_advice(incident: Incident) -> str:
    """From which checkpoint to go on."""
    poisoned = incident.culprit is not None and incident.culprit.examined.poisoned
    if incident.recovered and not poisoned:
        return "The weights were never touched (the steps were skipped): nothing to resume."
    if incident.inference:
        return "Nothing was trained, so there is no checkpoint to go back to."
    if incident.divergence is not None and incident.divergence.root == 0:
        return "The run was off its course from its first step on: no checkpoint is sound, start again."
    if incident.divergence is not None:
        return f"The run left its course at step {incident.divergence.root}: resume from a checkpoint before that step."
    if incident.last_finite is None:
        return "No step before it was finite: start again from the beginning or from an older checkpoint."
    return (
        f"Last step at which weights, optimizer state and buffers were all finite: {incident.last_finite}; resume from "
        "a checkpoint at or before it."
    )


def headroom_story(incident: Incident) -> str:
    """How the tensor at the origin approached the limit on the healthy steps before."""
    until = incident.step if incident.divergence is None else incident.divergence.root
    seen = [s for s in incident.history if s.step < until and s.headroom is not None and s.amax is not None]
    if not seen:
        return ""
    last = seen[-1]
    headroom = last.headroom or 0.0
    room = f"2^{headroom:.1f} times" if headroom >= 0.05 else "just"
    return f" At healthy step {last.step} it reached {last.amax:.4g}, {room} below the limit."


def consequences(incident: Incident) -> list[str]:
    """What else was non-finite at the same step, in words."""
    own = incident.origin.row.kind if incident.origin is not None else None
    nouns = {
        "batch": "input tensor",
        "input": "input",
        "output": "output",
        "loss": "loss",
        "grad_output": "output gradient",
        "weight_grad": "weight gradient",
        "weight_grad_step": "optimizer input",
        "weight": "weight",
        "update": "weight update",
    }
    result = []
    for kind, noun in nouns.items():
        count = incident.bad.get(kind, 0) - (kind == own)
        if count > 0:
            result.append("the loss" if kind == "loss" else plural(count, noun))
    return result


#: Which rule speaks of a kind when it is not a consequence; named so in the evidence.
_RULE_OF_KIND = {
    "loss": ("PD103", "nonfinite-loss"),
    "grad_output": ("PD102", "nonfinite-origin-backward"),
    "weight_grad": ("PD102", "nonfinite-origin-backward"),
    "weight_grad_step": ("PD102", "nonfinite-origin-backward"),
    "weight": ("PD105", "nonfinite-weights"),
    "update": ("PD105", "nonfinite-weights"),
}


def evidence_of(view: RunView, incident: Incident) -> dict[str, Any]:
    """Everything measured about an incident; ``range`` and ``path`` have the fixed shape of ``Finding``."""
    evidence: dict[str, Any] = {
        "last_finite_step": incident.last_finite,
        "last_bad_step": incident.last_step,
        "bad_steps": incident.bad_steps,
        "steps": list(incident.occurrences[:_LISTED]),
        "occurrences": len(incident.occurrences),
        "ranks": list(incident.ranks),
        "recovered": incident.recovered,
        "confidence_reason": incident.cause.why,
    }
    if incident.likely:
        evidence["likely_steps"] = list(incident.likely[:_LISTED])
    detected = view.detection(incident.process, incident.step)
    if detected is not None:
        evidence["detected_at"] = detected
    folded = {_RULE_OF_KIND[k]: n for k, n in incident.bad.items() if k in _RULE_OF_KIND}
    evidence["consequences"] = [
        {"code": code, "name": name, "message": f"{plural(count, 'tensor')} at step {incident.step}"}
        for (code, name), count in sorted(folded.items())
        if code != incident.code
    ]
    if incident.unrecorded is not None:
        evidence["unrecorded"] = incident.unrecorded
    if incident.origin is None:
        return evidence
    row, origin = incident.origin.row, incident.origin
    evidence |= {
        "range": range_evidence(incident.origin.after or row) if row.amax is None else range_evidence(row),
        "path": path_evidence(incident.path or (row,)),
        "nan": row.nan,
        "pos_inf": row.pos_inf,
        "neg_inf": row.neg_inf,
        "numel": row.numel,
        "limit": 0,
        "first_bad_micro_step": row.first_bad_micro_step,
        "made_by": origin.maker,
        "history": [{"step": s.step, "amax": s.amax, "headroom_binades": s.headroom} for s in incident.history],
    }
    if origin.masks:
        evidence["masks"] = [{**path_evidence([m])[0], "neg_inf_share": m.neg_inf / m.numel} for m in origin.masks]
    return evidence


def location_of(incident: Incident) -> Location:
    """Where an incident happened."""
    origin = incident.origin
    return Location(
        root=origin.root if origin is not None else None,
        module=origin.module if origin is not None and origin.how != "loss-backward" else None,
        module_class=(origin.module_class or None) if origin is not None else None,
        kind=origin.row.kind if origin is not None else None,
        phase=incident.phase,
        rank=incident.process.rank,
        step=incident.step,
    )


def preceding(incident: Incident) -> TensorRow | None:
    """The last healthy tensor before the origin."""
    return incident.origin.after if incident.origin is not None else None


def confidence_of(view: RunView, incident: Incident, options: Options) -> float:
    """The rule's base confidence, lowered for what the log does not show; documented on every page."""
    if incident.unrecorded is not None:
        return options["unrecorded_confidence"]
    if incident.poison is not None and incident.culprit is None:
        return round(options["confidence"] - 0.2, 2)
    if incident.culprit is not None:
        return incident.culprit.certainty
    confidence = options["confidence"]
    if incident.origin is not None and incident.origin.how in _INFERRED:
        confidence -= 0.05
    if view.partial_modules:
        confidence -= 0.2
    if incident.origin is not None and incident.origin.row.order is None:
        confidence -= 0.2
    if incident.origin is not None and incident.origin.masks and incident.cause.name is None:
        confidence -= 0.15
    return round(max(confidence, 0.1), 2)


def _confidence(view: RunView, incident: Incident, options: Options) -> float:
    """That of the incident; a root is inferred from what was recorded on the way."""
    known = confidence_of(view, incident, options)
    return known if incident.divergence is None else min(known, _ROOTED)


def where_words(view: RunView, incident: Incident) -> str:
    """``at step 37`` with the rank when there is more than one, and the micro-step when accumulation was on."""
    words = f"at step {incident.step}"
    origin = incident.origin
    if origin is not None and origin.row.first_bad_micro_step and incident.phase is not Phase.OPTIMIZER:
        words += f" (micro-step {origin.row.first_bad_micro_step})"
    if len({p.rank for p in view.processes}) > 1:
        words += f" on rank {incident.process.rank}"
    return words


def unrecorded_message(view: RunView, incident: Incident, what: str) -> str:
    """The message when the tensors of the step are not in the log."""
    first = max(0, incident.step - 8)
    return (
        f"{what} {where_words(view, incident)}, but {incident.unrecorded}, so its origin is unknown. "
        f"Record again with --every 1 --steps {first}:{incident.step + 1}. {resume_advice(incident)}"
    )


#: Title, message and prescription.
Told = tuple[str, str, Prescription]
Teller = Callable[[RunView, Incident], Told]


def check_incidents(view: RunView, rule: Rule, options: Options, tell: Teller, seen: str) -> Checked:
    """Turn the incidents that belong to ``rule`` into findings.

    Args:
        tell: gives title, message and prescription of one incident.
        seen: what a pass says it examined.
    """
    mine = [i for i in incidents(view) if i.code == rule.code]
    others = [i for i in incidents(view) if i.code != rule.code]
    findings = []
    for incident in [with_divergence(view, i) for i in mine]:
        title, message, prescription, location, evidence = _told(view, incident, tell)
        more = len(incident.occurrences) - 1
        if more > 0:
            message += f" The same happened at {plural(more, 'later step')}."
        if incident.likely:
            so = "it did" if more > 0 else "the same happened"
            message += f" Most likely {so} at {plural(len(incident.likely), 'further step')}, of which less is known."
        message += _never_stepped_again(view, incident)
        findings.append(
            Finding(
                code=rule.code,
                name=rule.name,
                severity=Severity.WARNING if incident.recovered else rule.severity,
                confidence=_confidence(view, incident, options),
                title=title,
                message=message,
                location=location,
                cause=incident.cause.name,
                evidence=evidence,
                prescriptions=(prescription,),
            )
        )
    if findings:
        return Checked(findings, f"{plural(len(findings), 'origin')} in {seen}", Status.FAILED)
    if others:
        origins = ", ".join(sorted({f"{i.code} at step {i.step}" for i in others}))
        return Checked((), f"{seen}; the non-finite values of this run start elsewhere ({origins})")
    return Checked((), f"{seen}, all finite, masks aside")


def with_divergence(view: RunView, incident: Incident) -> Incident:
    """The incident with what threw the run off before, where its operands can have been made huge by that."""
    from precdoctor.diagnosis.families.nonfinite.diverged_incident import OF_MAGNITUDE

    settings = incident.culprit is not None and incident.culprit.examined.bad_settings
    given = incident.culprit is not None and incident.culprit.blamed.external is not None
    if incident.cause.name not in OF_MAGNITUDE or incident.recovered or settings or given:
        return incident
    poisoned = incident.poison is not None and incident.cause.name != "optimizer-overflow"
    if incident.phase is Phase.DATA or incident.how == "start" or poisoned:
        return incident
    divergence = divergence_before(view, incident.process, incident.step)
    if divergence is not None and divergence.at == 0 and _just_beyond(incident):
        return incident  # nothing before it to be out of line with: the format is too narrow, not the run too large
    return replace(incident, divergence=divergence)


def _just_beyond(incident: Incident) -> bool:
    """Whether the op's result in FP64 lies within two binades of the end of the format that it overflowed."""
    op = incident.culprit.op if incident.culprit is not None else None
    wide = op.reference if op is not None else None
    if op is None or wide is None or wide.bad or not wide.amax or not op.results:
        return False
    fmt = known_format(op.results[0].dtype)
    return fmt is not None and fmt.headroom(wide.amax) >= -_BEYOND


def _never_stepped_again(view: RunView, incident: Incident) -> str:
    """That the run went on without an optimizer step, if it did: with the step, scripts leave out ``zero_grad()``."""
    facts = view.step_facts(incident.process, incident.step)
    usual = [s.micro_steps for s in view.timeline.get(incident.process, ()) if s.complete]
    if facts is None or facts.complete or not usual:
        return ""
    more = facts.micro_steps - max(usual)
    if more < _LATER_PASSES * max(usual):
        return ""
    return (
        f" The run went on with {plural(more, 'backward pass')} and took no optimizer step any more. If the script "
        "leaves out `zero_grad()` together with a step that is not finite, new gradients are added to a NaN for ever: "
        "zero them after every backward pass that is thrown away."
    )


def _told(view: RunView, incident: Incident, tell: Teller) -> tuple[str, str, Prescription, Location, dict[str, Any]]:
    """An incident the microscope led back to an op is told by the op, any other by its tensors; a root comes first."""
    from precdoctor.diagnosis.families.nonfinite.diverged_incident import tell_root
    from precdoctor.diagnosis.families.nonfinite.op_report import (
        culprit_evidence,
        locate_culprit,
        tell_culprit,
        tell_poison,
    )

    location, evidence = location_of(incident), evidence_of(view, incident)
    if incident.culprit is not None:
        told = tell_culprit(view, incident, incident.culprit)
        evidence |= culprit_evidence(incident.culprit)
        location = locate_culprit(view, incident, incident.culprit, location)
    else:
        told = tell(view, incident) if incident.poison is None else tell_poison(view, incident, incident.poison)
    if incident.divergence is not None:
        told, more = tell_root(view, incident, incident.divergence)
        evidence |= more
    return (*told, location, evidence)


def looked_at(view: RunView, kinds: Sequence[str], noun: str) -> str:
    """``412 gradients on 50 steps``."""
    tensors, steps = view.tensor_count(kinds)
    return f"{plural(tensors, noun)} on {plural(steps, 'step')}"
