"""One fault, one finding: consequences are reported inside the finding of their cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.claims.relations import Relation
from precdoctor.diagnosis.ranking.earlier_divergence import with_forerunners

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
