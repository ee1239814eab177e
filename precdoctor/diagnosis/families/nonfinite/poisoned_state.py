"""Slow poison: buffers and optimizer state that became non-finite in steps whose loss and gradients were finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at
from precdoctor.diagnosis.families.nonfinite.tensor_causes import UNKNOWN
from precdoctor.diagnosis.survey.op_facts import Examined, examined_at
from precdoctor.diagnosis.survey.view import Process, RunView

if TYPE_CHECKING:
    from precdoctor.diagnosis.families.nonfinite.incident_search import Incident


def poison_at(view: RunView, process: Process, step: int) -> Incident | None:
    """The incident of a step that made nothing non-finite but what outlives it; None for any other step."""
    from precdoctor.diagnosis.families.nonfinite.incident_search import Incident

    examined = examined_at(view, process, step)
    if examined is None or not examined.target or not examined.poisoned:
        return None
    culprit = culprit_at(view, process, step)
    phase = Phase.OPTIMIZER if examined.target == "optimizer-state" else Phase.FORWARD
    code = "PD105" if phase is Phase.OPTIMIZER else "PD101"
    cause = culprit.cause if culprit is not None else UNKNOWN
    return Incident(code, process, step, phase, None, cause, culprit=culprit, how="poison", poison=examined)


def traced_to_poison(found: Sequence[Incident]) -> list[Incident]:
    """Later incidents that came of a poisoned tensor are its consequences; no later step was wholly finite.

    Args:
        found: the incidents of one process, in order of step.
    """
    result: list[Incident] = []
    for incident in found:
        host = next((k for k, p in enumerate(result) if p.poison is not None and _came_of(incident, p.poison)), None)
        if host is not None:
            first = result[host]
            shown = first.shown if first.shown is not None else incident.step
            steps = first.bad_steps + incident.bad_steps
            result[host] = replace(first, last_step=incident.last_step, bad_steps=steps, shown=shown)
            continue
        earlier = [p.last_finite for p in result if p.poison is not None and p.step < incident.step]
        if earlier and incident.last_finite is not None:
            finite = [s for s in earlier if s is not None]
            last = min(incident.last_finite, *finite) if len(finite) == len(earlier) else None
            incident = replace(incident, last_finite=last)  # noqa: PLW2901 - the same one, better known
        result.append(incident)
    return result


def _came_of(incident: Incident, poison: Examined) -> bool:
    """Whether what the incident blames is one of the tensors that were poisoned."""
    external = incident.culprit.blamed.external if incident.culprit is not None else None
    if external is None or external[0] not in ("buffer", "weight"):
        return False
    return any(external[1] in (p.full_name, p.name) for p in poison.poisoned)


def poison_words(incident: Incident) -> str:
    """Which tensors the step left non-finite, and when that was seen; empty when it left none."""
    culprit = incident.culprit
    examined = incident.poison or (culprit.examined if culprit is not None else None)
    if examined is None or not examined.poisoned:
        return ""
    first, *others = examined.poisoned
    what = "optimizer state" if examined.target == "optimizer-state" else "buffer"
    more = f" ({len(others)} more like it)" if others else ""
    words = f" {what.capitalize()} `{first.full_name}`{more} holds {first.facts.count_words()} since then"
    if incident.shown is not None:
        return f"{words}; the loss or a gradient showed it at step {incident.shown}."
    if incident.poison is not None:
        return f"{words}, while loss and gradients stayed finite; nothing in training mends it."
    return f"{words}; skipping the step does not mend it."
