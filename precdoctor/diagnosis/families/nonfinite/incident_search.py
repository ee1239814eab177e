"""Finds the incidents of a run and leads each back to its origin.

All rules of the family share the answer, so the search runs once per run. Bad steps in a row are one incident. Ranks
share an incident if they report at the same step, or one step later through the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.nonfinite.bad_steps import GRADIENTS, incident_steps
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at, flushed_eps, settings_words
from precdoctor.diagnosis.families.nonfinite.incident import UNKNOWN, Cause, Incident
from precdoctor.diagnosis.families.nonfinite.merged_incidents import (
    merged_over_ranks,
    merged_over_time,
    without_consequences,
)
from precdoctor.diagnosis.families.nonfinite.tensor_causes import backward_cause, forward_cause
from precdoctor.diagnosis.survey.healthy_steps import is_well, reference_of
from precdoctor.diagnosis.survey.op_facts import BadSetting, replay_at
from precdoctor.diagnosis.survey.origin import Origin, Reference, locate_backward, locate_forward, suspicious
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, TensorRow, path_to
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Incidents led back to their origin, per process; it bounds the work on a run that never recovers.
MAX_INCIDENTS = 32
#: Steps to go back for the last one that changed a weight; with several optimizers they take turns.
_LAST_UPDATE = 4
_PHASE_ORDER = [Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER]
_CODE_OF_PHASE = {Phase.DATA: "PD104", Phase.FORWARD: "PD101", Phase.LOSS: "PD103", Phase.BACKWARD: "PD102"}


def incidents(view: RunView) -> tuple[Incident, ...]:
    """All incidents of the run, in order of step and phase; computed once per view."""
    return view.remember("incidents", lambda: tuple(_all_incidents(view)))


def _all_incidents(view: RunView) -> list[Incident]:
    found = [i for process in view.processes for i in _of_process(view, process)]
    found.sort(key=lambda i: (i.step, _PHASE_ORDER.index(i.phase), i.origin is None, i.process))
    return merged_over_time(merged_over_ranks(found))


# -- one process ------------------------------------------------------------------------------------------------------


def _of_process(view: RunView, process: Process) -> list[Incident]:
    bad_steps = incident_steps(view).get(process, {})
    order = [f.step for f in view.timeline.get(process, ())] or sorted(bad_steps)
    episodes = [list(steps) for bad, steps in groupby(order, bad_steps.__contains__) if bad]
    found = []
    for episode in episodes[:MAX_INCIDENTS]:
        incident = _incident_at(view, process, episode[0], bad_steps)
        if incident is not None:
            found.append(_with_course(view, incident, episode, bad_steps, order))
    return without_consequences(view, found)


def _with_course(
    view: RunView,
    incident: Incident,
    episode: Sequence[int],
    bad_steps: Mapping[int, frozenset[str]],
    order: Sequence[int],
) -> Incident:
    """The incident with the steps before and after it: last finite, last bad, recovered or not."""
    facts = [view.step_facts(incident.process, s) for s in episode]
    skipped = all(f is not None and f.skipped for f in facts)
    inference = all(f is not None and f.inference for f in facts)
    followed = any(s > episode[-1] and s not in bad_steps and not _was_skipped(view, incident, s) for s in order)
    clean = [
        s
        for s in order
        if s < incident.step
        and s not in bad_steps
        and (not (f := view.step_facts(incident.process, s)) or is_well(view, incident.process, f))
    ]
    return replace(
        incident,
        last_finite=None if inference else _last_finite(view, incident, clean, order),
        inference=inference,
        last_step=episode[-1],
        bad_steps=len(episode),
        recovered=skipped and followed,
        passed=followed or len(episode) == 1,
        ranks=(incident.process.rank,),
        occurrences=(incident.step,),
    )


def _was_skipped(view: RunView, incident: Incident, step: int) -> bool:
    facts = view.step_facts(incident.process, step)
    return facts is not None and facts.skipped


def _last_finite(view: RunView, incident: Incident, clean: Sequence[int], order: Sequence[int]) -> int | None:
    """The last step after which weights, optimizer state and buffers were all finite, as far as the log shows."""
    replay = replay_at(view, incident.process, incident.step)
    if replay is not None and replay.finite_before:
        return max((s for s in order if s < incident.step), default=None)
    if clean and (incident.unrecorded is not None or incident.how == "between"):
        clean = clean[:-1]  # its update, and so a checkpoint written after it, may be what went wrong
    last = clean[-1] if clean else None
    seen = [p.last_finite for p in incident.poison.poisoned if p.last_finite is not None] if incident.poison else []
    return min([last, *seen]) if last is not None else None


# -- one step ---------------------------------------------------------------------------------------------------------


def _incident_at(
    view: RunView, process: Process, step: int, bad_steps: Mapping[int, frozenset[str]]
) -> Incident | None:
    """The incident that begins at ``step``; None if only a mask is non-finite there."""
    if bad_steps[step] == {"buffer"}:
        return _poisoning(view, process, step)
    seen = _from_tensors(view, process, step, bad_steps)
    culprit = culprit_at(view, process, step)
    if culprit is None:
        return seen
    in_optimizer = culprit.replay.phase == "optimizer"
    if seen is not None and seen.how == "start":
        if culprit.op.phase != "forward" or culprit.external is not None:
            return seen
        seen = replace(seen, how="")  # the step's own forward pass wrote it there
    if seen is not None and seen.how == "between" and not in_optimizer:
        return seen
    if culprit.between_roots and seen is not None and seen.origin is not None:
        return seen  # made by code that no replay reaches: the tensors on both sides of it say more
    code = _CODE_OF_PHASE.get(culprit.phase, "PD105")
    if seen is None:
        how = ("optimizer" if in_optimizer else "between") if code == "PD105" else ""
        return Incident(code, process, step, culprit.phase, None, culprit.cause, culprit=culprit, how=how)
    how = "optimizer" if code == "PD105" and in_optimizer else seen.how
    return replace(seen, how=how, code=code, phase=culprit.phase, cause=culprit.cause, culprit=culprit, unrecorded=None)


def _poisoning(view: RunView, process: Process, step: int) -> Incident | None:
    """The incident of a step that made only buffers or optimizer state non-finite; None for any other step."""
    replay = replay_at(view, process, step)
    if replay is None or not replay.target or not replay.poisoned:
        return None
    culprit = culprit_at(view, process, step)
    phase = Phase.OPTIMIZER if replay.target == "optimizer-state" else Phase.FORWARD
    code = "PD105" if phase is Phase.OPTIMIZER else "PD101"
    cause = culprit.cause if culprit is not None else UNKNOWN
    return Incident(code, process, step, phase, None, cause, culprit=culprit, how="poison", poison=replay)


def _from_tensors(
    view: RunView, process: Process, step: int, bad_steps: Mapping[int, frozenset[str]]
) -> Incident | None:
    """The incident at ``step`` from its recorded tensors alone, at module level."""
    rows = [r for r in view.rows(process, step) if r.phase != "recompute"]
    facts = view.step_facts(process, step)
    if not rows:
        return _unrecorded(process, step, bad_steps[step], facts)
    bad = dict(Counter(r.kind for r in rows if r.bad))
    weight = next((r for r in rows if r.kind == "weight" and r.bad and not r.mask_like), None)
    if weight is not None:
        return replace(_bad_weights(view, process, step, weight), bad=bad)
    reference = reference_of(view, process, step, frozenset(bad_steps))
    skipped = facts is not None and facts.skipped
    forward = _forward(view, process, step, rows, reference, facts)
    if forward is not None:
        return None if skipped and _scaled_loss_overflow(forward) else replace(forward, bad=bad)
    if skipped:
        return None
    backward = _backward(view, process, step, rows, reference, facts) or _after_backward(view, process, step, rows)
    if backward is not None:
        return replace(backward, bad=bad)
    return None if not bad else _unrecorded(process, step, bad_steps[step], facts)


def _forward(
    view: RunView, process: Process, step: int, rows: Sequence[TensorRow], reference: Reference, facts: StepFacts | None
) -> Incident | None:
    losses = [r for r in rows if r.kind == "loss"]
    loss_is_finite = not any(r.bad for r in losses) and not (facts is not None and facts.loss_is_bad)
    loss_checked = facts is not None and facts.complete and not facts.inference
    loss_is_finite = loss_is_finite and (bool(losses) or loss_checked)
    candidates = [r for r in rows if r.kind in (*FORWARD_KINDS, "loss")]
    row, masks = suspicious(candidates, reference, loss_is_finite=loss_is_finite)
    if row is None:
        return None
    origin = locate_forward(row, rows, masks, view.module_classes)
    code = _CODE_OF_PHASE[origin.phase]
    return Incident(
        code,
        process,
        step,
        origin.phase,
        origin,
        forward_cause(origin, rows, _earlier_weights(view, process, step, origin)),
        path=tuple(path_to(_forward_path(view, process, rows, origin), row)),
        history=tuple(reference.get(row.key, ())),
    )


def _forward_path(view: RunView, process: Process, rows: Sequence[TensorRow], origin: Origin) -> list[TensorRow]:
    """The step's forward tensors; before a bad batch only those of models, not of transforms of samples."""
    path = [r for r in rows if r.kind in (*FORWARD_KINDS, "loss")]
    if origin.phase is not Phase.DATA:
        return path
    models = {root.get("name") for root in view.facts(process).get("roots") or () if root.get("parameters")}
    return [r for r in path if r.root == origin.root or r.root in models]


def _earlier_weights(view: RunView, process: Process, step: int, origin: Origin) -> list[TensorRow]:
    """The origin module's weights and updates on the last step before ``step`` that recorded them."""
    earlier = [f.step for f in view.timeline.get(process, ()) if f.step < step and f.sampled]
    for before in reversed(earlier[-_LAST_UPDATE:]):
        rows = [r for r in view.rows(process, before) if (r.root, r.module) == (origin.root, origin.module)]
        if any(r.kind == "weight" for r in rows):
            return [r for r in rows if r.kind in ("weight", "update")]
    return []


def _scaled_loss_overflow(incident: Incident) -> bool:
    """Whether only the multiplication by the loss scale made an FP16 loss overflow: the scaler's backoff mends it."""
    row = incident.origin.row if incident.origin else None
    return (
        row is not None and row.kind == "loss" and row.dtype == "float16" and (row.scale or 1.0) > 1.0 and not row.nan
    )


def _backward(
    view: RunView, process: Process, step: int, rows: Sequence[TensorRow], reference: Reference, facts: StepFacts | None
) -> Incident | None:
    gradients = [r for r in rows if r.kind in BACKWARD_KINDS]
    row, _ = suspicious(gradients, reference, loss_is_finite=False)
    if row is None:
        return None
    origin = locate_backward(row, rows, view.module_classes)
    scale = facts.loss_scale if facts is not None else None
    path = path_to([r for r in rows if r.kind in (*FORWARD_KINDS, "loss", *BACKWARD_KINDS)], row)
    return Incident(
        "PD102",
        process,
        step,
        Phase.BACKWARD,
        origin,
        backward_cause(origin, rows, scale),
        path=tuple(path),
        history=tuple(reference.get(row.key, ())),
    )


def _after_backward(view: RunView, process: Process, step: int, rows: Sequence[TensorRow]) -> Incident | None:
    """The incident of a step with finite local gradients: in what the optimizer received, or in its update."""
    given = next((r for r in rows if r.kind == "weight_grad_step" and r.bad), None)
    if given is not None:
        origin = locate_backward(given, rows, view.module_classes)
        return Incident("PD102", process, step, Phase.BACKWARD, origin, UNKNOWN, path=_parameter_path(rows, given))
    update = next((r for r in rows if r.kind == "update" and r.bad), None)
    if update is None:
        return None
    return _by_optimizer(view, process, step, update, rows)


def _parameter_path(rows: Sequence[TensorRow], about: TensorRow) -> tuple[TensorRow, ...]:
    """One parameter through a step: weight, local gradient, gradient that the optimizer received, update."""
    order = ["weight", "weight_grad", "weight_grad_step", "update"]
    mine = [r for r in rows if r.kind in order and r.owner == about.owner]
    return tuple(sorted(mine, key=lambda r: (r.position, order.index(r.kind)))) or (about,)


def _by_optimizer(view: RunView, process: Process, step: int, row: TensorRow, rows: Sequence[TensorRow]) -> Incident:
    origin = Origin(row, Phase.OPTIMIZER, row.root, row.module, row.module_class, "module", None)
    cause = UNKNOWN
    facts = view.step_facts(process, step)
    rates = [BadSetting(group, "lr", rate) for group, rate in (facts.bad_rates if facts is not None else ())]
    if rates:  # the log does not say which group the weight is in
        cause = Cause("other", 0.9, settings_words(rates))
    elif lost := flushed_eps(view, row.dtype):
        cause = Cause("optimizer-division-by-zero", 0.85, lost)
    elif row.nan == 0 and row.inf:
        cause = Cause("optimizer-overflow", 0.8, "finite gradients became infinite weights")
    return Incident(
        "PD105", process, step, Phase.OPTIMIZER, origin, cause, path=_parameter_path(rows, row), how="optimizer"
    )


def _bad_weights(view: RunView, process: Process, step: int, row: TensorRow) -> Incident:
    """The incident of a step that starts with non-finite weights, although the step before ended well."""
    earlier = [f for f in view.timeline.get(process, ()) if f.step < step]
    origin = Origin(row, Phase.OPTIMIZER, row.root, row.module, row.module_class, "module", None)
    cause = Cause("nonfinite-weights", 0.9, "the weights are non-finite before the step's forward pass")
    if not earlier:
        return Incident("PD105", process, step, Phase.FORWARD, origin, cause, path=(row,), how="start")
    for facts in reversed(earlier[-_LAST_UPDATE:]):  # with several optimizers the last step need not be this weight's
        before = view.rows(process, facts.step)
        same = [r for r in before if r.module == row.module and r.name == row.name and r.root == row.root]
        if any(r.kind == "weight" for r in same):
            break
    healthy = any(r.kind == "weight" for r in same) and not any(r.bad for r in same)
    if healthy and not any(r.kind == "update" for r in same):
        previous = next(r for r in same if r.kind == "weight")
        incident = _by_optimizer(view, process, facts.step, row, before)
        return replace(incident, path=(previous, *[r for r in same if r.kind.startswith("weight_grad")], row))
    return Incident("PD105", process, step, Phase.OPTIMIZER, origin, cause, path=(row,), how="between")


def _unrecorded(process: Process, step: int, kinds: frozenset[str], facts: StepFacts | None) -> Incident:
    """The incident of a step whose tensors are not in the log."""
    why = "the step was not sampled" if facts is None or not facts.sampled else "the step's tensors are not in the log"
    if "loss" in kinds:
        return Incident("PD103", process, step, Phase.LOSS, None, UNKNOWN, unrecorded=why)
    if kinds & GRADIENTS:
        return Incident("PD102", process, step, Phase.BACKWARD, None, UNKNOWN, unrecorded=why)
    return Incident("PD105", process, step, Phase.OPTIMIZER, None, UNKNOWN, unrecorded=why, how="between")
