"""Runs that had left their course before a value became non-finite: the overflow is how that ended, not how it began.

What is wrong then is what threw the run off, and a checkpoint from just before the overflow is one of a run that is
lost already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity

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
