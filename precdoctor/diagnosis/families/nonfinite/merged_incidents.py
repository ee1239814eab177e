"""Merges incidents that are one fault: consequences of an earlier one, the same event on other ranks, repetitions.

Every public function takes incidents in order of step and returns the merged ones, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from precdoctor.diagnosis.analyses.op_facts import Replay
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.nonfinite.incident import Incident
from precdoctor.diagnosis.survey.view import RunView

#: Tensor kinds that the optimizer receives or makes.
_OPTIMIZER_KINDS = frozenset(("weight_grad_step", "update"))


# -- consequences in one process --------------------------------------------------------------------------------------


def without_consequences(view: RunView, incidents: Sequence[Incident]) -> list[Incident]:
    """Merge each incident of a process into the earlier one whose non-finite tensors caused it.

    The two need not be consecutive: with several optimizers (a GAN, an actor and a critic) a step of another optimizer
    may be finite in between.
    """
    known = _without_poisoned(incidents)
    return _merged(known, lambda first, later: _follows_from_weights(view, later, first), _with_bad_steps)


def _merged(
    incidents: Iterable[Incident],
    belongs: Callable[[Incident, Incident], bool],
    combine: Callable[[Incident, Incident], Incident],
) -> list[Incident]:
    """Combine each incident with the first one before it that it belongs to."""
    result: list[Incident] = []
    for incident in incidents:
        host = next((k for k, first in enumerate(result) if belongs(first, incident)), None)
        if host is None:
            result.append(incident)
        else:
            result[host] = combine(result[host], incident)
    return result


def _without_poisoned(incidents: Sequence[Incident]) -> list[Incident]:
    """Merge incidents that read a poisoned tensor into the incident of the step that poisoned it.

    After a poisoning no step was fully finite, so the ``last_finite`` of later incidents moves back before it.
    """
    result: list[Incident] = []
    for incident in incidents:
        host = next((k for k, p in enumerate(result) if p.poison and _reads_poisoned(incident, p.poison)), None)
        if host is not None:
            first = _with_bad_steps(result[host], incident)
            result[host] = replace(first, shown_at=incident.step if first.shown_at is None else first.shown_at)
            continue
        earlier = [p.last_finite for p in result if p.poison is not None and p.step < incident.step]
        if earlier and incident.last_finite is not None:
            finite = [s for s in earlier if s is not None]
            last = min(incident.last_finite, *finite) if len(finite) == len(earlier) else None
            result.append(replace(incident, last_finite=last))
        else:
            result.append(incident)
    return result


def _reads_poisoned(incident: Incident, poison: Replay) -> bool:
    """Whether the culprit of the incident only read one of the poisoned tensors."""
    external = incident.culprit.external if incident.culprit is not None else None
    if external is None or external[0] not in ("buffer", "weight"):
        return False
    return any(external[1] in (p.full_name, p.name) for p in poison.poisoned)


def _follows_from_weights(view: RunView, incident: Incident, first: Incident) -> bool:
    """Whether ``first`` left the weights non-finite that ``incident`` shows.

    At ``first`` the optimizer received or made non-finite values for the module, the step was not skipped, and no
    recorded output of the module was finite between the two.
    """
    place = _suspected_weights(incident)
    facts = view.step_facts(first.process, first.step)
    if place is None or first.recovered or (facts is not None and facts.skipped):
        return False
    rows = view.rows(first.process, first.step)
    optimizer_rows = [r for r in rows if r.kind in _OPTIMIZER_KINDS and (r.root, r.module) == place]
    between = (f.step for f in view.timeline.get(first.process, ()) if first.step < f.step < incident.step)
    return any(r.bad for r in optimizer_rows) and not any(
        r.kind == "output" and (r.root, r.module) == place and not r.bad
        for step in between
        for r in view.rows(first.process, step)
    )


def _suspected_weights(incident: Incident) -> tuple[str, str] | None:
    """Root and module of the weights that may have been non-finite; None if an op or another phase is to blame."""
    if incident.culprit is not None and incident.culprit.external is None:
        return None
    if incident.origin is None or incident.phase not in (Phase.FORWARD, Phase.OPTIMIZER):
        return None
    return incident.origin.root, incident.origin.module


# -- ranks ------------------------------------------------------------------------------------------------------------


def _same_event(first: Incident, other: Incident) -> bool:
    """Whether another rank reports the event of ``first``, at the same step or one step later."""
    close = first.step <= other.step <= first.step + 1
    return close and other.process.rank not in first.ranks and other.process.attempt == first.process.attempt


def _combined(first: Incident, other: Incident) -> Incident:
    """``first`` with the ranks, the last bad step and the recovery of both incidents."""
    return replace(
        first,
        ranks=tuple(sorted({*first.ranks, *other.ranks})),
        last_step=max(first.last_step, other.last_step),
        recovered=first.recovered and other.recovered,
        passed=first.passed and other.passed,
    )


# -- repetitions ------------------------------------------------------------------------------------------------------


def merged_over_ranks_and_time(incidents: Sequence[Incident]) -> list[Incident]:
    """Merge ranks that report the same event: at the same step, or one step later, carried over by the weights.

    Then merge incidents with the same origin: later ones become ``occurrences`` or ``likely_steps`` of the first.
    """
    events = _merged(incidents, _same_event, _combined)
    return _with_likely(_merged(events, lambda first, later: first.identity == later.identity, _with_occurrences))


def _with_occurrences(first: Incident, later: Incident) -> Incident:
    return _with_bad_steps(replace(first, occurrences=(*first.occurrences, *later.occurrences)), later)


def _with_bad_steps(first: Incident, incident: Incident) -> Incident:
    return replace(_combined(first, incident), bad_steps=first.bad_steps + incident.bad_steps)


def _with_likely(incidents: Iterable[Incident]) -> list[Incident]:
    """Merge each incident that was not fully recorded into the earlier one that it may repeat, if there is only one."""
    result: list[Incident] = []
    for incident in incidents:
        hosts = [k for k, first in enumerate(result) if _compatible(incident, first)]
        if len(hosts) != 1:
            result.append(incident)
            continue
        first = result[hosts[0]]
        likely = replace(first, likely_steps=(*first.likely_steps, *incident.occurrences))
        result[hosts[0]] = _with_bad_steps(likely, incident)
    return result


def _compatible(incident: Incident, first: Incident) -> bool:
    """Whether the run got past both incidents, and every known fact of the later one holds for the earlier one.

    An incident that the run did not get past is always reported by itself. So is one with a culprit: its identity
    already decided whether it is a repetition.
    """
    same_kind = (incident.code, incident.how) == (first.code, first.how) and incident.passed and first.passed
    if not same_kind or incident.culprit is not None or incident.poison is not None:
        return False
    if incident.origin is None:
        return first.origin is not None or first.culprit is not None
    if first.culprit is None or first.origin is None:
        return False
    places = [(o.root, o.module, o.row.key) for o in (incident.origin, first.origin)]
    return places[0] == places[1]
