"""One fault, one finding: consequences are reported inside the finding of their cause.

Where a run had left its course before a value became non-finite, the overflow is how that ended, not how it began.
What is wrong then is what threw the run off, and a checkpoint from just before the overflow is one of a run that is
lost already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import Relation

#: Per code of a cause the relation it needs to each code of an effect: ``Rule.explains`` of every rule.
Relations = Mapping[str, Mapping[str, Relation]]

#: Findings of non-finite values, and families that judge values: in a diverged run, both follow from the divergence.
_NONFINITE, _OF_VALUES = ("PD101", "PD102", "PD103", "PD105", "PD106"), ("PD1", "PD2", "PD3", "PD6")


def explains(cause: Finding, effect: Finding, relations: Relations) -> bool:
    """Whether ``effect`` is a consequence of ``cause``: by what the rule of ``cause`` declares, or by a divergence."""
    relation = relations.get(cause.code, {}).get(effect.code)
    return _follows(cause, effect) or (relation is not None and relation(cause, effect))


def _follows(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` appeared only after the step at which ``cause`` has the run diverge."""
    root, begun, ended = cause.evidence.get("left_its_course_at"), effect.location.step, cause.location.step
    if "chain" not in cause.evidence or root is None or begun is None or ended is None:
        return False
    if effect.code in _NONFINITE:
        return begun > ended
    return begun >= root and effect.code[:3] in _OF_VALUES and effect.code != "PD104"


def fold(findings: Sequence[Finding], relations: Relations) -> list[Finding]:
    """The findings that are nobody's consequence, each with its consequences added to ``evidence["consequences"]``."""
    kept: list[Finding] = []
    for finding in findings:
        if any(other is not finding and explains(other, finding, relations) for other in findings):
            continue
        effects = _effects(finding, findings, relations)
        kept.append(with_forerunners(_with_consequences(finding, effects), effects) if effects else finding)
    return kept


def _effects(cause: Finding, findings: Sequence[Finding], relations: Relations) -> list[Finding]:
    """What ``cause`` explains, directly or through what it explains."""
    reached = [cause]
    for link in reached:  # grows while it is walked
        reached += [f for f in findings if explains(link, f, relations) and not any(f is r for r in reached)]
    return reached[1:]


def _with_consequences(finding: Finding, effects: Sequence[Finding]) -> Finding:
    own = list(finding.evidence.get("consequences", ()))
    if "chain" in finding.evidence:  # what followed over steps says more than how many tensors it reached
        own = [*({"code": e.code, "name": e.name, "message": e.title} for e in effects), *own]
    for effect in effects:
        told = {"code": effect.code, "name": effect.name, "message": effect.title}
        own += [c for c in (told, *effect.evidence.get("consequences", ())) if c not in own]
    heaviest = max([finding, *effects], key=lambda f: f.severity.weight)
    confidence = max(finding.confidence, *(min(0.9, e.confidence) for e in effects))
    evidence = {**finding.evidence, "consequences": own}
    return replace(finding, severity=heaviest.severity, confidence=confidence, evidence=evidence)


#: Findings of non-finite values that a divergence may end in.
_ENDS = ("PD101", "PD102", "PD103", "PD105")
#: Explosion, loss spike, oversized updates.
_DIVERGES = ("PD603", "PD605", "PD504")
#: Steps that a spike or an oversized update may lie back: as many as a spike is measured against. An explosion says
#: itself that the run did not come back.
_WINDOW = 32
#: Evidence of gradient descent that diverges: the largest rate at which it would not.
_RATE = "stable_rate"
#: Changes that only look closer, only go back, or hold down any run: what threw this one off is mended before.
_GENERAL = ("hook", "detect_anomaly", "checkpoint_at_or_before", "clip_norm")


def with_forerunners(finding: Finding, effects: Sequence[Finding]) -> Finding:
    """The finding with the advice of what came before it, and the step at which the run left its course.

    That of large updates, which many runs survive, only where the finding has no cure of its own, or where gradient
    descent is seen to diverge: then the rate comes first, for what overflowed had to.

    Args:
        finding: kept; of any code.
        effects: what is told with it.
    """
    if "chain" in finding.evidence:
        return finding  # it leads with its root already
    own = [p for p in finding.prescriptions if not _is_general(p)]
    before = [e for e in effects if _led_to(e, finding) and (e.code != "PD504" or not own or _RATE in e.evidence)]
    off = sorted((at, e.code) for e in before if (at := _left_its_course(e)) is not None)
    if not before:
        return finding
    general = [p for p in finding.prescriptions if _is_general(p)]
    first = [p for e in before if _RATE in e.evidence for p in e.prescriptions]
    then = [p for e in before if _RATE not in e.evidence for p in e.prescriptions]
    told = replace(finding, prescriptions=_once([*first, *own, *then, *general]))
    if not off:
        return told
    back = "resume from a checkpoint before that step" if off[0][0] else "no checkpoint is older: start again"
    return replace(
        told,
        message=f"{finding.message} Training had already diverged at step {off[0][0]} ({off[0][1]}, below): {back}.",
        evidence={**finding.evidence, "left_its_course_at": off[0][0]},
    )


def _led_to(effect: Finding, finding: Finding) -> bool:
    begun, ended = effect.location.step, finding.location.step
    if finding.code not in _ENDS or effect.code not in _DIVERGES or effect.severity is Severity.INFO:
        return False
    if begun is None or ended is None or finding.evidence.get("recovered"):
        return False
    return begun < ended and (effect.code == "PD603" or ended - begun <= _WINDOW)


def _once(prescriptions: Sequence[Prescription]) -> list[Prescription]:
    """Each change once: two effects of one rate ask for the same."""
    return [p for i, p in enumerate(prescriptions) if not any(p.change == q.change for q in prescriptions[:i])]


def _left_its_course(effect: Finding) -> int | None:
    """At which step; None for large updates, unless gradient descent is seen to diverge with them."""
    from_the_first = effect.evidence.get("diverges_from")
    step = from_the_first if from_the_first is not None else effect.location.step
    return int(step) if step is not None and (effect.code != "PD504" or from_the_first is not None) else None


def _is_general(prescription: Prescription) -> bool:
    return any(key in prescription.change for key in _GENERAL)
