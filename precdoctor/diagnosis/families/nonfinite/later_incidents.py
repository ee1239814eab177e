"""Consequences: what weights that an incident left non-finite do to later steps of the same module.

With several optimizers (a GAN, an actor and a critic) a step of another one may be finite in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.survey.view import RunView

if TYPE_CHECKING:
    from precdoctor.diagnosis.families.nonfinite.incident_search import Incident

#: What the optimizer was given, or made of it.
_GIVEN = frozenset(("weight_grad_step", "update"))


def without_aftermath(view: RunView, found: Sequence[Incident]) -> list[Incident]:
    """Incidents that only show what an earlier one left behind are counted with that one.

    Args:
        found: the incidents of one process, in order of step.
    """
    result: list[Incident] = []
    for incident in found:
        host = next((k for k, first in enumerate(result) if _came_of(view, incident, first)), None)
        if host is None:
            result.append(incident)
            continue
        first = result[host]
        steps = first.bad_steps + incident.bad_steps
        result[host] = replace(first, last_step=incident.last_step, bad_steps=steps)
    return result


def _came_of(view: RunView, incident: Incident, first: Incident) -> bool:
    """Whether a module blamed was given bad gradients at the first incident, and has been finite at no step since."""
    place = _blamed_weights(incident)
    facts = view.step_facts(first.process, first.step)
    if place is None or first.recovered or (facts is not None and facts.skipped):
        return False
    given = [r for r in view.rows(first.process, first.step) if r.kind in _GIVEN and (r.root, r.module) == place]
    between = (f.step for f in view.timeline.get(first.process, ()) if first.step < f.step < incident.step)
    return any(r.bad for r in given) and not any(
        r.kind == "output" and (r.root, r.module) == place and not r.bad
        for step in between
        for r in view.rows(first.process, step)
    )


def _blamed_weights(incident: Incident) -> tuple[str, str] | None:
    """Root and module whose own weights may be what went wrong; null where an operation is to blame."""
    if incident.culprit is not None and incident.culprit.blamed.external is None:
        return None
    if incident.origin is None or incident.phase not in (Phase.FORWARD, Phase.OPTIMIZER):
        return None
    return incident.origin.root, incident.origin.module
