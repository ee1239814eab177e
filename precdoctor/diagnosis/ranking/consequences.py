"""One fault, one finding: consequences are told inside the finding of their cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Phase
from precdoctor.diagnosis.ranking.earlier_divergence import with_forerunners

#: Findings of the first code explain those of the others when they cover the same steps.
_EXPLAINS = {
    "PD104": ("PD101", "PD102", "PD103", "PD105", "PD106", "PD301", "PD302", "PD603", "PD605"),
    "PD108": ("PD101", "PD102", "PD103", "PD105", "PD106", "PD605"),
    "PD101": ("PD301",),
    "PD102": ("PD301",),
    "PD103": ("PD301",),
    "PD405": ("PD101", "PD102", "PD103", "PD105", "PD106", "PD301"),
    "PD507": ("PD605",),
}
#: What leads to a non-finite value, or is the same fault seen from another side: told with it, whatever the steps.
_NEAR_NONFINITE = (
    "PD106",
    "PD302",
    "PD304",
    "PD504",
    "PD506",
    "PD601",
    "PD602",
    "PD603",
    "PD604",
    "PD605",
    "PD606",
    "PD709",
)
#: Findings of the first code explain those of the others wherever they are: both speak of the run as a whole.
_EXPLAINS_RUN = {
    **dict.fromkeys(("PD101", "PD102", "PD103", "PD105"), _NEAR_NONFINITE),
    "PD201": ("PD202", "PD203", "PD204", "PD303", "PD305"),
    "PD202": ("PD203", "PD303", "PD305"),
    "PD204": ("PD203",),
    "PD301": ("PD302", "PD303", "PD709"),
    "PD302": ("PD709",),
    "PD307": ("PD301", "PD302", "PD303", "PD709"),
    "PD309": ("PD303", "PD503", "PD506"),
    "PD501": ("PD502", "PD505"),
    "PD504": ("PD203", "PD204"),
    "PD603": ("PD406", "PD504", "PD605", "PD606"),
    "PD601": ("PD709",),
    "PD604": ("PD601", "PD602"),
}
#: ... when they speak of the same module.
_EXPLAINS_PLACE = {
    "PD101": ("PD107", "PD206", "PD705", "PD706"),
    "PD301": ("PD601", "PD602"),
    "PD506": ("PD504",),
    "PD507": ("PD701",),
    "PD401": ("PD203",),
    "PD402": ("PD203", "PD706"),
    "PD602": ("PD406", "PD601"),
}
#: ... when all tensors of the effect are among those of the cause (``evidence["tensors"]``): FP8 operands.
_EXPLAINS_TENSORS = {
    "PD401": ("PD407",),
    "PD402": ("PD407", "PD409"),
    "PD403": ("PD402", "PD407", "PD408", "PD409"),
    "PD404": ("PD407",),
    "PD405": ("PD401", "PD402", "PD404", "PD407", "PD411"),
    "PD408": ("PD402", "PD407", "PD409"),
    "PD411": ("PD402", "PD407"),
}
#: ... when the worst tensor of the effect is.
_EXPLAINS_WORST = {"PD404": ("PD401",)}
#: Findings of non-finite values, and families that judge values: in a run off its course, both are what came of it.
_NONFINITE, _OF_VALUES = ("PD101", "PD102", "PD103", "PD105", "PD106"), ("PD1", "PD2", "PD3", "PD6")
#: Causes of a gradient beyond its format's range: a lower loss scale mends them.
_OUT_OF_RANGE = ("matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "loss-scale-overflow")

#: Learning rates per step from which on a run may be thrown off its course: Adam's longest step is 7 of them.
_LONG_STEP = 10.0


def covered_steps(finding: Finding) -> tuple[int, int] | None:
    """The steps a finding answers for, first and last; None when it is not about steps."""
    first = finding.location.step
    if first is None:
        return None
    last = finding.evidence.get("explains_until", finding.evidence.get("last_bad_step", first))
    skipped = int(finding.evidence.get("skips_in_a_row", 1)) - 1  # a loss scaler had seen it before anybody looked
    return first - skipped, max(first, int(last if last is not None else first))


def explains(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` is a consequence of ``cause``: named so above, and it begins while the cause is at work."""
    if _follows(cause, effect):
        return True
    if {cause.code, effect.code} == {"PD102", "PD301"}:
        gradient = cause if cause.code == "PD102" else effect
        return (cause.code == "PD301") == _mended_by_the_scale(gradient) and _begins_within(cause, effect)
    if cause.code == "PD606" and effect.code in ("PD601", "PD602", "PD709"):
        return _reads(cause, effect)
    kept_low = "flushed_at_level" in cause.evidence and effect.code in ("PD201", "PD202")
    lost = cause.code == "PD506" and _follows_lost_moments(cause, effect)
    if kept_low or lost or effect.code in _EXPLAINS_RUN.get(cause.code, ()):
        return True
    if {cause.code, effect.code} == {"PD703", "PD706"}:  # a cast that was seen is nearer to the fault than its sine
        angles = cause if cause.code == "PD703" else effect
        told_by_cast = angles.evidence.get("effect") == "angles"
        return _same_place(cause, effect) and (cause.code == "PD706") == told_by_cast
    if effect.code in _EXPLAINS_PLACE.get(cause.code, ()):
        return _same_place(cause, effect)
    if effect.code in _EXPLAINS_TENSORS.get(cause.code, ()):
        effects = _tensors(effect)
        return bool(effects) and set(effects) <= set(_tensors(cause))
    if (cause.code, effect.code) == ("PD204", "PD503"):
        starved = _modules(effect, "weights", "parameter")
        return bool(starved) and starved <= _modules(cause, "layers", "module")
    if effect.code in _EXPLAINS_WORST.get(cause.code, ()):
        return any(worst in _tensors(cause) for worst in _tensors(effect)[:1])
    return effect.code in _EXPLAINS.get(cause.code, ()) and _begins_within(cause, effect)


def _follows(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` was seen only after the run had left its course, as ``cause`` has it."""
    root, begun, ended = cause.evidence.get("left_its_course_at"), effect.location.step, cause.location.step
    if "chain" not in cause.evidence or root is None or begun is None or ended is None:
        return False
    if effect.code in _NONFINITE:
        return begun > ended
    return begun >= root and effect.code[:3] in _OF_VALUES and effect.code != "PD104"


def _same_place(a: Finding, b: Finding) -> bool:
    return (a.location.root, a.location.module) == (b.location.root, b.location.module)


def _reads(logits: Finding, effect: Finding) -> bool:
    """Whether ``effect`` speaks of the same logits: of their format, or inside the module whose softmax reads them."""
    if "spacing_nats" in effect.evidence:
        return True
    place, inside = logits.location.module, effect.location.module or ""
    same_root = logits.location.root == effect.location.root
    return bool(place) and same_root and (inside == place or inside.startswith(f"{place}."))


def _mended_by_the_scale(gradient: Finding) -> bool:
    """Whether it was the loss scale that was too high: out of range, skipped, and training went on at a lower one."""
    return bool(gradient.evidence.get("recovered")) and gradient.cause in _OUT_OF_RANGE


def _begins_within(cause: Finding, effect: Finding) -> bool:
    span, begin = covered_steps(cause), effect.evidence.get("first_overflow_step", effect.location.step)
    return span is not None and begin is not None and span[0] <= int(begin) <= span[1]


def _follows_lost_moments(moments: Finding, effect: Finding) -> bool:
    """Whether moments of zero threw the run off, or a state of the optimizer stays as it is in their format.

    Steps are of many learning rates where eps is far below the gradients that are lost.
    """
    if effect.code == "PD509":
        same = moments.evidence.get("dtype") == effect.evidence.get("dtype") is not None
        return same and effect.evidence.get("target") == "state" and effect.location.phase is Phase.OPTIMIZER
    kept, eps = moments.evidence.get("smallest_gradient_kept"), moments.evidence.get("eps_in_state_format")
    if effect.code not in ("PD603", "PD605") or kept is None or eps is None:
        return False
    return 0.0 < float(kept) >= _LONG_STEP * float(eps)


def _modules(finding: Finding, evidence: str, name: str) -> set[tuple[str | None, str]]:
    """Root and FQN of the modules that an entry of the evidence lists, as they are or by their parameters."""
    listed = [str(entry.get(name)) for entry in finding.evidence.get(evidence, ())]
    modules = (n.rpartition(".")[0] if name == "parameter" else n for n in listed)
    return {(finding.location.root, m) for m in modules}


def _tensors(finding: Finding) -> list[tuple[Any, ...]]:
    """What identifies the tensors a finding is about, the worst first."""
    names = ("root", "module", "kind", "name", "call")
    return [tuple(t.get(n) for n in names) for t in finding.evidence.get("tensors", ())]


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are nobody's consequence, each with its consequences added to ``evidence["consequences"]``."""
    kept: list[Finding] = []
    for finding in findings:
        if any(other is not finding and explains(other, finding) for other in findings):
            continue
        effects = _effects(finding, findings)
        kept.append(with_forerunners(_with_consequences(finding, effects), effects) if effects else finding)
    return kept


def _effects(cause: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """What ``cause`` explains, directly or through what it explains."""
    reached = [cause]
    for link in reached:  # grows while it is walked
        reached += [f for f in findings if explains(link, f) and not any(f is r for r in reached)]
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
