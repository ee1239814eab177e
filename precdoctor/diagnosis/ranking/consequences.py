"""Folds findings: a finding that another one explains is reported inside that one, as a consequence.

If training had already diverged when a value became non-finite, the divergence is the fault and the overflow its end.
A checkpoint from just before the overflow is then of a diverged run, so the advice of the divergence comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import Relation

#: ``{code of a cause: {code of an effect: required relation}}``: ``Rule.explains`` of every rule.
Relations = Mapping[str, Mapping[str, Relation]]

#: Rules on non-finite values; families of rules on values. In a diverged run, findings of both are consequences.
_NONFINITE, _OF_VALUES = ("PD101", "PD102", "PD103", "PD105", "PD106"), ("PD1", "PD2", "PD3", "PD6")


def explains(cause: Finding, effect: Finding, relations: Relations) -> bool:
    """Return whether ``effect`` is a consequence: by ``Rule.explains`` of the cause, or because training diverged."""
    relation = relations.get(cause.code, {}).get(effect.code)
    return _follows_divergence(cause, effect) or (relation is not None and relation(cause, effect))


def _follows_divergence(cause: Finding, effect: Finding) -> bool:
    """Return whether ``cause`` has a chain from a root, and ``effect`` follows from it.

    Non-finite values follow if they appear after the finding's step, other values from the root on.
    """
    root, effect_step, cause_step = cause.evidence.get("left_its_course_at"), effect.location.step, cause.location.step
    if "chain" not in cause.evidence or root is None or effect_step is None or cause_step is None:
        return False
    if effect.code in _NONFINITE:
        return effect_step > cause_step
    return effect_step >= root and effect.code[:3] in _OF_VALUES and effect.code != "PD104"


def fold(findings: Sequence[Finding], relations: Relations) -> list[Finding]:
    """Drop findings that another one explains; each remaining one lists its consequences in its evidence."""
    kept: list[Finding] = []
    for finding in findings:
        if any(other is not finding and explains(other, finding, relations) for other in findings):
            continue
        effects = _effects(finding, findings, relations)
        kept.append(with_forerunners(_with_consequences(finding, effects), effects) if effects else finding)
    return kept


def _effects(cause: Finding, findings: Sequence[Finding], relations: Relations) -> list[Finding]:
    """Return the findings that ``cause`` explains, directly or through others."""
    reached = [cause]
    for link in reached:  # the loop appends to this list
        reached += [f for f in findings if explains(link, f, relations) and not any(f is r for r in reached)]
    return reached[1:]


def _with_consequences(finding: Finding, effects: Sequence[Finding]) -> Finding:
    """Add the consequences to the finding's evidence; it takes the highest severity and confidence among them.

    The confidence of a consequence counts as 0.9 at most.
    """
    own = list(finding.evidence.get("consequences", ()))
    if "chain" in finding.evidence:  # effects on later steps are more telling than a count of affected tensors
        own = [*({"code": e.code, "name": e.name, "message": e.title} for e in effects), *own]
    for effect in effects:
        entry = {"code": effect.code, "name": effect.name, "message": effect.title}
        own += [c for c in (entry, *effect.evidence.get("consequences", ())) if c not in own]
    heaviest = max([finding, *effects], key=lambda f: f.severity.weight)
    confidence = max(finding.confidence, *(min(0.9, e.confidence) for e in effects))
    evidence = {**finding.evidence, "consequences": own}
    return replace(finding, severity=heaviest.severity, confidence=confidence, evidence=evidence)


#: Rules on non-finite values that a divergence may end in.
_ENDS = ("PD101", "PD102", "PD103", "PD105")
#: Rules on divergence: gradient explosion, loss spike, oversized updates.
_DIVERGES = ("PD603", "PD605", "PD504")
#: Most steps between a spike or an oversized update and the end: the window of a spike's usual level. The finding of an
#: explosion states that the run did not recover, so it may be any number of steps before.
_WINDOW = 32
#: Key of the evidence that gradient descent diverges: the largest stable learning rate.
_RATE = "stable_rate"
#: Keys of general changes (inspect, go back, clip): advice on the cause of this divergence comes before them.
_GENERAL = ("hook", "detect_anomaly", "check_gradients", "checkpoint_at_or_before", "clip_norm")


def with_forerunners(finding: Finding, effects: Sequence[Finding]) -> Finding:
    """Add the prescriptions of a divergence that led to a non-finite value, and the step at which it began.

    Many runs survive large updates, so their advice is added only if the finding has no specific one itself, or if
    gradient descent diverges: then the learning rate comes first, because the overflow was inevitable.

    Args:
        finding: a remaining finding, of any code.
        effects: its consequences, among which the divergence may be.
    """
    if "chain" in finding.evidence:
        return finding  # its advice is that of the root already
    own = [p for p in finding.prescriptions if not _is_general(p)]
    before = [e for e in effects if _leads_to(e, finding) and (e.code != "PD504" or not own or _RATE in e.evidence)]
    off = sorted((at, e.code) for e in before if (at := _diverged_at(e)) is not None)
    if not before:
        return finding
    general = [p for p in finding.prescriptions if _is_general(p)]
    first = [p for e in before if _RATE in e.evidence for p in e.prescriptions]
    then = [p for e in before if _RATE not in e.evidence for p in e.prescriptions]
    advised = replace(finding, prescriptions=_without_repeats([*first, *own, *then, *general]))
    if not off:
        return advised
    back = "resume from a checkpoint before that step" if off[0][0] else "no checkpoint is older: start again"
    return replace(
        advised,
        message=f"{finding.message} Training had already diverged at step {off[0][0]} ({off[0][1]}, below): {back}.",
        evidence={**finding.evidence, "left_its_course_at": off[0][0]},
    )


def _leads_to(effect: Finding, finding: Finding) -> bool:
    effect_step, end_step = effect.location.step, finding.location.step
    if finding.code not in _ENDS or effect.code not in _DIVERGES or effect.severity is Severity.INFO:
        return False
    if effect_step is None or end_step is None or finding.evidence.get("recovered"):
        return False
    return effect_step < end_step and (effect.code == "PD603" or end_step - effect_step <= _WINDOW)


def _without_repeats(prescriptions: Sequence[Prescription]) -> list[Prescription]:
    """Drop prescriptions of a change that is listed before: two effects of one learning rate prescribe the same."""
    return [p for i, p in enumerate(prescriptions) if not any(p.change == q.change for q in prescriptions[:i])]


def _diverged_at(effect: Finding) -> int | None:
    """Return the step at which training diverged; None for large updates unless gradient descent diverges."""
    from_the_first = effect.evidence.get("diverges_from")
    step = from_the_first if from_the_first is not None else effect.location.step
    return int(step) if step is not None and (effect.code != "PD504" or from_the_first is not None) else None


def _is_general(prescription: Prescription) -> bool:
    return any(key in prescription.change for key in _GENERAL)
