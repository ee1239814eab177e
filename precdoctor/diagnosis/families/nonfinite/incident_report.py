"""Turns incidents into findings: evidence, location, confidence.

If training had diverged before the incident, the finding leads with the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from precdoctor.diagnosis.analyses.replays import replay_at
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, fraction
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence.learning_rates import JUMP
from precdoctor.diagnosis.divergence.onset import EXPLODED, REPLACED, Divergence, divergence_before
from precdoctor.diagnosis.divergence.report import chain_words, root_cure, root_evidence, root_words
from precdoctor.diagnosis.families.nonfinite import op_report
from precdoctor.diagnosis.families.nonfinite.incident import Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.families.nonfinite.rank_order import rank_order
from precdoctor.diagnosis.families.nonfinite.tensor_causes import provenance
from precdoctor.diagnosis.survey.rows import dotted, location, path_evidence, range_evidence
from precdoctor.diagnosis.survey.view import RunView

Describe = Callable[[RunView, Incident], Report]

#: Occurrences listed in the evidence; a screen holds no more.
_MAX_LISTED = 16
#: Backward passes after the last optimizer step, as a multiple of the most per step; accumulation stays below it.
_LATER_PASSES = 4
#: Highest confidence of a finding that leads with a divergence: the divergence is inferred, not seen at an op.
_DIVERGED_CONFIDENCE = 0.85
#: Up to this many binades above a format's maximum the format is at fault, not the numbers. Chosen empirically.
_SLIGHTLY_BEYOND = 2.0
#: ``Origin.how`` if the origin was inferred from the tensors on both sides of code without hooks.
_INFERRED_ORIGINS = ("functional", "between-roots", "loss-backward")
#: Causes that a divergence explains, because its operands are huge; undefined operations have a fault of their own.
_CAUSES_OF_MAGNITUDE = (
    *(None, "other", "matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow"),
    *("exp-overflow", "optimizer-overflow", "inf-minus-inf"),
)
#: The rule that would report a kind of tensor; the evidence lists it as a consequence.
_RULE_OF_KIND = {
    "loss": ("PD103", "nonfinite-loss"),
    "grad_output": ("PD102", "nonfinite-origin-backward"),
    "weight_grad": ("PD102", "nonfinite-origin-backward"),
    "weight_grad_step": ("PD102", "nonfinite-origin-backward"),
    "weight": ("PD105", "nonfinite-weights"),
    "update": ("PD105", "nonfinite-weights"),
}


def confidence_options(certain: float) -> tuple[RuleOption, ...]:
    """The options that all rules on incidents share; ``certain`` is the rule's default base confidence."""
    recorded = "Confidence of a finding whose step is fully recorded."
    rest = "Chosen empirically: what remains is a producer outside any recorded tensor."
    unknown = "Chosen empirically: the non-finite value is certain, its origin is not."
    return (
        fraction("confidence", certain, recorded, rest),
        fraction(
            "unrecorded_confidence", 0.5, "Confidence if the step's tensors are not in the log.", unknown
        ),
    )  # fmt: skip


def check_incidents(
    view: RunView, rule: Rule, options: Options, describe: Describe, kinds: Sequence[str], noun: str
) -> Checked:
    """The findings for the incidents that belong to ``rule``.

    Args:
        describe: reports an incident from its tensors; used if it was not replayed.
        kinds, noun: the tensors that the rule checked.
    """
    seen = checked_words(view, kinds, noun)
    own = [with_divergence(view, i) for i in incidents(view) if i.code == rule.code]
    if own:
        findings = [_finding(view, rule, options, incident, describe) for incident in own]
        return Checked(findings, f"{plural(len(findings), 'origin')} in {seen}")
    if elsewhere := sorted({f"{i.code} at step {i.step}" for i in incidents(view)}):
        return Checked((), f"{seen}; the non-finite values of this run start elsewhere ({', '.join(elsewhere)})")
    return Checked((), f"{seen}, all finite, masks aside")


def checked_words(view: RunView, kinds: Sequence[str], noun: str) -> str:
    """The number of recorded tensors of these kinds: ``412 gradients on 50 steps``."""
    tensors, steps = view.tensor_count(kinds)
    return f"{plural(tensors, noun)} on {plural(steps, 'step')}"


def _finding(view: RunView, rule: Rule, options: Options, incident: Incident, describe: Describe) -> Finding:
    location, evidence = location_of(incident), evidence_of(view, incident)
    if incident.culprit is not None:
        report = op_report.report_culprit(view, incident, incident.culprit)
        evidence |= op_report.culprit_evidence(incident.culprit)
        location = op_report.culprit_location(view, incident, incident.culprit, location)
    elif incident.poison is not None:
        report = op_report.report_poisoning(view, incident, incident.poison)
    else:
        report = describe(view, incident)
        if incident.first_seen is not None:
            report = report._replace(message=report.message + incident.first_seen_words)
            location = replace(location, source=incident.first_seen.source)
    confidence = confidence_of(view, incident, options)
    if incident.divergence is not None:
        report = _report_divergence(view, incident, incident.divergence)
        evidence |= root_evidence(incident.divergence)
        confidence = min(confidence, _DIVERGED_CONFIDENCE)
    order = rank_order(view, incident.step)
    spread = ""
    if order is not None:
        origin = incident.process.rank if incident.phase is Phase.DATA else None
        evidence["rank_order"], spread = order.evidence, order.words(origin)
    severity = Severity.WARNING if incident.recovered else None
    if incident.is_evaluation and incident.recovered and not incident.bad_samples:
        severity = Severity.INFO  # padding, as a rule: nobody reads such elements
    return rule.finding(
        severity=severity,
        confidence=confidence,
        title=f"{report.title}, in a call without gradients" if incident.is_evaluation else report.title,
        message=report.message + spread + _repetition_words(incident) + _never_stepped_again(view, incident),
        location=location,
        cause=incident.cause.name,
        evidence=evidence,
        prescription=report.prescription,
    )


def _repetition_words(incident: Incident) -> str:
    more, likely = len(incident.occurrences) - 1, len(incident.likely_steps)
    if more > 0 and incident.is_evaluation:
        return f" The same happened after step {incident.occurrences[1]}; later calls were not examined."
    words = f" The same happened at {plural(more, 'later step')}." if more > 0 else ""
    if likely:
        were = "was" if likely == 1 else "were"
        words += f" It probably recurred at {plural(likely, 'more step')} that {were} not fully recorded."
    return words


def _never_stepped_again(view: RunView, incident: Incident) -> str:
    """A sentence if the run went on with backward passes but no optimizer step; else empty.

    Scripts that skip the optimizer step after a non-finite value often skip ``zero_grad()`` as well.
    """
    facts = view.step_facts(incident.process, incident.step)
    micro_steps = [s.micro_steps for s in view.timeline.get(incident.process, ()) if s.complete]
    if facts is None or facts.complete or not micro_steps:
        return ""
    more = facts.micro_steps - max(micro_steps)
    if more < _LATER_PASSES * max(micro_steps):
        return ""
    return (
        f" The run went on with {plural(more, 'backward pass')} but took no further optimizer step. If the script "
        "leaves out `zero_grad()` after a non-finite step, new gradients are added to NaN for ever. Call it after "
        "every discarded backward pass."
    )


# -- evidence, place, confidence --------------------------------------------------------------------------------------


def evidence_of(view: RunView, incident: Incident) -> dict[str, Any]:
    """Everything measured about an incident; ``range`` and ``path`` have the fixed shape of ``Finding``."""
    evidence: dict[str, Any] = {
        "last_finite_step": incident.last_finite,
        "last_bad_step": incident.last_step,
        "bad_steps": incident.bad_steps,
        "steps": list(incident.occurrences[:_MAX_LISTED]),
        "occurrences": len(incident.occurrences),
        "ranks": list(incident.ranks),
        "recovered": incident.recovered,
        "confidence_reason": incident.cause.why,
    }
    if incident.cause.name == "nonfinite-input-batch":
        evidence["provenance"] = provenance(replay_at(view, incident.process, incident.step), incident.bad_tensor)
    if incident.likely_steps:
        evidence["likely_steps"] = list(incident.likely_steps[:_MAX_LISTED])
    if (detected := view.detection(incident.process, incident.step)) is not None:
        evidence["detected_at"] = detected
    consequences = {_RULE_OF_KIND[k]: n for k, n in incident.bad.items() if k in _RULE_OF_KIND}
    evidence["consequences"] = [
        {"code": code, "name": name, "message": f"{plural(count, 'tensor')} at step {incident.step}"}
        for (code, name), count in sorted(consequences.items())
        if code != incident.code
    ]
    if incident.unrecorded is not None:
        evidence["unrecorded"] = incident.unrecorded
    if incident.origin is None:
        return evidence
    row, origin = incident.origin.row, incident.origin
    evidence |= {
        "range": range_evidence(origin.after or row) if row.amax is None else range_evidence(row),
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
    """The place of an incident, by its tensors alone; :func:`.op_report.culprit_location` narrows it to an op."""
    place, origin = location(None, incident.phase, incident.process, incident.step), incident.origin
    if origin is None:
        return place
    return replace(
        place,
        root=origin.root,
        module=origin.module if origin.how != "loss-backward" else None,
        module_class=origin.module_class or None,
        kind=origin.row.kind,
    )


def confidence_of(view: RunView, incident: Incident, options: Options) -> float:
    """The culprit's certainty; without one the rule's base, lowered for gaps in the log (see the rules' pages)."""
    if incident.unrecorded is not None:
        return options["unrecorded_confidence"]
    if incident.poison is not None and incident.culprit is None:
        return round(options["confidence"] - 0.2, 2)
    if incident.culprit is not None:
        return incident.culprit.certainty
    confidence, origin = options["confidence"], incident.origin
    if incident.phase is Phase.DATA:
        confidence = min(confidence, incident.cause.confidence)
    if incident.how == "between" or (origin is not None and origin.how in _INFERRED_ORIGINS):
        confidence -= 0.05
    if view.partial_modules:
        confidence -= 0.2
    if origin is not None and origin.row.order is None:
        confidence -= 0.2
    if origin is not None and origin.masks and incident.cause.name is None:
        confidence -= 0.15
    return round(max(confidence, 0.1), 2)


# -- divergence before the incident -----------------------------------------------------------------------------------


def with_divergence(view: RunView, incident: Incident) -> Incident:
    """Add the divergence before the incident, if there is one that can have made the operands huge."""
    culprit = incident.culprit
    has_other_reason = culprit is not None and (culprit.replay.bad_settings or culprit.external is not None)
    if incident.cause.name not in _CAUSES_OF_MAGNITUDE or incident.recovered or has_other_reason:
        return incident
    poisoned = incident.poison is not None and incident.cause.name != "optimizer-overflow"
    if incident.phase is Phase.DATA or incident.how == "start" or poisoned:
        return incident
    divergence = divergence_before(view, incident.process, incident.step)
    if divergence is not None and divergence.at == 0 and _just_beyond(incident):
        return incident  # no healthy step to compare with, and a slightly wider format would have held the result
    return replace(incident, divergence=divergence)


def _just_beyond(incident: Incident) -> bool:
    """Whether the op's result in FP64 is at most ``_SLIGHTLY_BEYOND`` binades above the maximum of its format."""
    op = incident.culprit.op if incident.culprit is not None else None
    reference = op.reference if op is not None else None
    fmt = op.result_format if op is not None else None
    if fmt is None or reference is None or reference.bad or not reference.amax:
        return False
    return fmt.headroom(reference.amax) >= -_SLIGHTLY_BEYOND


def _report_divergence(view: RunView, incident: Incident, divergence: Divergence) -> Report:
    """Report the step at which training diverged and the change that mends it; the op is only where it ended."""
    end = _end_words(incident)
    limits = f"{REPLACED:g} for update / weight, {EXPLODED:g} times for a norm, {JUMP:g} times for a rate"
    other = divergence.process.rank
    where = f" It began on rank {other}, with another stage of the pipeline." if other != incident.process.rank else ""
    message = (
        f"{chain_words(divergence, incident.step, end)}{where} The limits are {limits}.{incident.cause.sentence} A "
        f"wider format or a clamp at that place would only hide it. {incident.resume_advice}"
    )
    title = f"{root_words(view, divergence)}; at step {incident.step} {end}"
    return Report(title, message, root_cure(view, divergence))


def _end_words(incident: Incident) -> str:
    """The end of the divergence, in words: ``exp in `blocks.0.attn` becomes non-finite``."""
    if (culprit := incident.culprit) is not None:
        if culprit.op.phase == "optimizer":
            return f"the optimizer step leaves `{dotted(culprit.op.module or '', culprit.op.parameter)}` non-finite"
        root = culprit.replay.root
        where = f"`{culprit.op.module or root}`" if root else "the loss code"
        return f"{culprit.op.short} in {where} becomes non-finite"
    if incident.origin is not None:
        return f"{incident.origin.row.label} becomes non-finite"
    return "the loss is non-finite" if incident.phase is Phase.LOSS else "values become non-finite"
