"""Incidents that are one fault: on several ranks at once, again at the same origin, or most likely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precdoctor.diagnosis.families.nonfinite.incident_search import Incident


def over_ranks(found: Sequence[Incident]) -> list[Incident]:
    """One incident per event: a rank that reports at most one step after another has caught it through the weights."""
    merged: list[Incident] = []
    for incident in found:
        host = next((i for i, m in enumerate(merged) if _same_event(m, incident)), None)
        if host is None:
            merged.append(incident)
            continue
        first = merged[host]
        merged[host] = replace(
            first,
            ranks=tuple(sorted({*first.ranks, *incident.ranks})),
            last_step=max(first.last_step, incident.last_step),
            recovered=first.recovered and incident.recovered,
            passed=first.passed and incident.passed,
        )
    return merged


def _same_event(first: Incident, other: Incident) -> bool:
    close = first.step <= other.step <= first.step + 1
    return close and other.process.rank not in first.ranks and other.process.attempt == first.process.attempt


def over_time(found: Sequence[Incident]) -> list[Incident]:
    """One incident per fault: later occurrences of the same origin are listed under the first."""
    merged: dict[tuple[object, ...], Incident] = {}
    for incident in found:
        first = merged.get(incident.identity)
        if first is None:
            merged[incident.identity] = incident
            continue
        again = replace(first, occurrences=(*first.occurrences, *incident.occurrences))
        merged[incident.identity] = _joined(again, incident)
    return _with_likely(merged.values())


def _joined(first: Incident, incident: Incident) -> Incident:
    """The first, and how the course went on with a later one."""
    return replace(
        first,
        ranks=tuple(sorted({*first.ranks, *incident.ranks})),
        bad_steps=first.bad_steps + incident.bad_steps,
        last_step=max(first.last_step, incident.last_step),
        recovered=first.recovered and incident.recovered,
        passed=first.passed and incident.passed,
    )


def _with_likely(found: Iterable[Incident]) -> list[Incident]:
    """Incidents of which less is known are counted with the one earlier incident that they may be, if there is one."""
    result: list[Incident] = []
    for incident in found:
        hosts = [k for k, first in enumerate(result) if _may_be(incident, first)]
        if len(hosts) != 1:
            result.append(incident)
            continue
        first = result[hosts[0]]
        result[hosts[0]] = _joined(replace(first, likely=(*first.likely, *incident.occurrences)), incident)
    return result


def _may_be(incident: Incident, first: Incident) -> bool:
    """Whether nothing speaks against it: the run got over both, and what is known of the later one is true of both.

    What a run does not get over is told by itself, however little is known of it.
    """
    alike = (incident.code, incident.how) == (first.code, first.how) and incident.passed and first.passed
    if not alike or incident.culprit is not None or incident.poison is not None:
        return False
    if incident.origin is None:
        return first.origin is not None or first.culprit is not None
    if first.culprit is None or first.origin is None:
        return False
    places = [(i.origin.root, i.origin.module, i.origin.row.key) for i in (incident, first) if i.origin is not None]
    return places[0] == places[1]
