"""Finds the incidents of a run, each with its origin.

All rules of the family share the result, so the search runs once per run. Consecutive bad steps are one incident. Ranks
share an incident if they report it at the same step, or one step later, when the weights have carried it over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from precdoctor.diagnosis.analyses.healthy_steps import is_well, reference_of
from precdoctor.diagnosis.analyses.op_facts import BadSetting, Replay
from precdoctor.diagnosis.analyses.origin import Origin, Reference, locate_backward, locate_forward, suspicious
from precdoctor.diagnosis.analyses.replays import replay_at
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.nonfinite.bad_steps import GRADIENTS, episodes, incident_steps
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at, first_seen, flushed_eps, settings_words
from precdoctor.diagnosis.families.nonfinite.incident import UNKNOWN, Cause, Incident
from precdoctor.diagnosis.families.nonfinite.merged_incidents import merged_over_ranks_and_time, without_consequences
from precdoctor.diagnosis.families.nonfinite.tensor_causes import backward_cause, forward_cause
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, TensorRow, path_to
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView, remembered

#: Maximum number of incidents per process; bounds the work on a run that is non-finite again and again.
MAX_INCIDENTS = 32
#: Maximum number of steps to go back to the last update of a weight; several optimizers step in turns.
_LAST_UPDATE = 4
_PHASE_ORDER = [Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER]
_CODE_OF_PHASE = {Phase.DATA: "PD104", Phase.FORWARD: "PD101", Phase.LOSS: "PD103", Phase.BACKWARD: "PD102"}


@remembered
def incidents(view: RunView) -> tuple[Incident, ...]:
    """All incidents of the run, in order of step and phase; computed once per view."""
    found = [i for process in view.processes for i in _process_incidents(view, process)]
    found.sort(key=_priority)
    return tuple(merged_over_ranks_and_time(found))


def _priority(incident: Incident) -> tuple[object, ...]:
    """Sort key: among ranks that report the same step, one whose own code made the value goes first.

    After it come the ranks that received the value through the reduction of gradients, or whose origin is unknown.
    """
    received = incident.culprit is None and incident.origin is not None and incident.origin.how == "reduction"
    unknown = (incident.culprit is None, incident.origin is None)
    return (incident.step, received, _PHASE_ORDER.index(incident.phase), *unknown, incident.process)


@dataclass(frozen=True, eq=False)
class _Step:
    """A bad step of a process.

    Attributes:
        bad_steps: all bad steps of the process, with the kinds of their non-finite tensors.
        order: all steps of the process.
    """

    view: RunView
    process: Process
    number: int
    bad_steps: Mapping[int, frozenset[str]]
    order: Sequence[int]

    @cached_property
    def rows(self) -> list[TensorRow]:
        return [r for r in self.view.rows(self.process, self.number) if r.phase != "recompute"]

    @property
    def facts(self) -> StepFacts | None:
        return self.view.step_facts(self.process, self.number)

    @property
    def earlier(self) -> list[StepFacts]:
        return [f for f in self.view.timeline.get(self.process, ()) if f.step < self.number]

    @cached_property
    def reference(self) -> Reference:
        """Sightings of the step's tensors on healthy steps, to tell masks from overflows."""
        return reference_of(self.view, self.process, self.number, frozenset(self.bad_steps))

    def incident(self, phase: Phase, cause: Cause, origin: Origin | None = None, **more: Any) -> Incident:
        """The incident that begins here, reported by the rule for its phase."""
        code, step, ranks = _CODE_OF_PHASE.get(phase, "PD105"), self.number, (self.process.rank,)
        return Incident(
            code, self.process, step, phase, origin, cause, last_step=step, ranks=ranks, occurrences=(step,), **more
        )


# -- one process ------------------------------------------------------------------------------------------------------


def _process_incidents(view: RunView, process: Process) -> list[Incident]:
    """The incidents of one process in order of step, without those that follow from an earlier one."""
    bad_steps = incident_steps(view).get(process, {})
    order = [f.step for f in view.timeline.get(process, ())] or sorted(bad_steps)
    found = []
    for episode in islice(episodes(view, process, order, bad_steps), MAX_INCIDENTS):
        at = _Step(view, process, episode[0], bad_steps, order)
        if (incident := _find_incident(at)) is not None:
            found.append(_with_outcome(at, incident, episode))
    return without_consequences(view, found)


def _with_outcome(at: _Step, incident: Incident, episode: Sequence[int]) -> Incident:
    """Add what the surrounding steps show: the last finite step, the last bad one, whether training recovered.

    ``episode``: the consecutive bad steps that begin with the incident's.
    """
    facts_of = partial(at.view.step_facts, at.process)
    facts = [facts_of(s) for s in episode]
    replay = replay_at(at.view, at.process, incident.step)
    if replay is not None and replay.evaluation:
        return _with_evaluation(at, incident, replay)
    given_up = replay is not None and replay.given_up
    skipped = all(f is not None and (f.skipped or given_up) for f in facts)
    inference = all(f is not None and f.inference for f in facts)
    later = [s for s in at.order if s > episode[-1] and s not in at.bad_steps]
    followed = any(not ((f := facts_of(s)) and f.skipped) for s in later)
    followed = followed or (given_up and all(f is not None and f.complete for f in facts))
    clean_steps = [
        s
        for s in at.order
        if s < incident.step and s not in at.bad_steps and (not (f := facts_of(s)) or is_well(at.view, at.process, f))
    ]
    visible = (s for s in episode[1:] if at.bad_steps[s] & {"loss", *GRADIENTS})
    return replace(
        incident,
        shown_at=next(visible, None) if incident.poison is not None else None,
        last_finite=None if inference else _last_finite(at, incident, clean_steps),
        inference=inference,
        last_step=episode[-1],
        bad_steps=len(episode),
        recovered=skipped and followed,
        skipped_by="script" if given_up else _skipped_by(at.view, [f for f in facts if f is not None]),
        passed=followed or len(episode) == 1,
    )


def _with_evaluation(at: _Step, incident: Incident, replay: Replay) -> Incident:
    """Add that a call without gradients is non-finite; so is the training if the call read a bad weight or buffer.

    The step before the call may have spoilt it.
    """
    external = incident.culprit.external if incident.culprit is not None else None
    spoilt = external is not None and external[0] in ("weight", "buffer")
    return replace(
        incident,
        last_finite=max((s for s in at.order if s < incident.step), default=None) if spoilt else incident.step,
        recovered=not spoilt,
        skipped_by="evaluation",
        bad_samples=replay.bad_samples,
        passed=True,
    )


def _skipped_by(view: RunView, steps: Sequence[StepFacts]) -> str:
    """What skips bad steps: ``scaler``, ``policy`` (``--on-nonfinite skip``), empty if unknown."""
    if any(s.loss_scale is not None or s.found_inf is not None for s in steps):
        return "scaler"
    options = view.run.info.get("options")
    return "policy" if isinstance(options, Mapping) and options.get("on_nonfinite") == "skip" else ""


def _last_finite(at: _Step, incident: Incident, clean_steps: Sequence[int]) -> int | None:
    """The last step after which weights, optimizer state and buffers were all finite, as far as the log shows.

    ``clean_steps`` are the healthy steps before the incident.
    """
    replay = replay_at(at.view, at.process, incident.step)
    if replay is not None and replay.finite_before:
        return max((s for s in at.order if s < incident.step), default=None)
    if clean_steps and (incident.unrecorded is not None or incident.how == "between"):
        clean_steps = clean_steps[:-1]  # the update of the last clean step may have made the weights non-finite
    last = clean_steps[-1] if clean_steps else None
    finite = [p.last_finite for p in incident.poison.poisoned if p.last_finite is not None] if incident.poison else []
    return min([last, *finite]) if last is not None else None


# -- one step ---------------------------------------------------------------------------------------------------------


def _find_incident(at: _Step) -> Incident | None:
    """The incident that begins at a step; None if only masks are non-finite there, or the loss scaler handles it.

    The culprit op replaces the cause from the recorded tensors, unless no replay reaches the code that made the value.
    """
    if at.bad_steps[at.number] == {"buffer"}:
        return _poisoning_incident(at)
    base = _row_incident(at)
    culprit = culprit_at(at.view, at.process, at.number)
    if culprit is None:
        return base and replace(base, first_seen=first_seen(at.view, at.process, at.number))
    in_optimizer = culprit.replay.phase == "optimizer"
    if base is not None and base.how == "start":
        if culprit.op.phase != "forward" or culprit.external is not None:
            return base
        base = replace(base, how="")  # the forward pass of this step made the weight non-finite
    if base is not None and base.how == "between" and not in_optimizer:
        return base
    between_roots = culprit.external is not None and culprit.external[0] == "argument"
    if between_roots and base is not None and base.origin is not None:
        return base  # code that no replay reaches made the value: the tensors on both sides of that code say more
    code = _CODE_OF_PHASE.get(culprit.phase, "PD105")
    if base is None:
        how = ("optimizer" if in_optimizer else "between") if code == "PD105" else ""
        return at.incident(culprit.phase, culprit.cause, culprit=culprit, how=how)
    how = ("optimizer" if in_optimizer else "between") if code == "PD105" else base.how
    return replace(base, how=how, code=code, phase=culprit.phase, cause=culprit.cause, culprit=culprit, unrecorded=None)


def _poisoning_incident(at: _Step) -> Incident | None:
    """The incident of a step that made only buffers or optimizer state non-finite; None for any other step."""
    replay = replay_at(at.view, at.process, at.number)
    if replay is None or not replay.target or not replay.poisoned:
        return None
    culprit = culprit_at(at.view, at.process, at.number)
    phase = Phase.OPTIMIZER if replay.target == "optimizer-state" else Phase.FORWARD
    return at.incident(
        phase, culprit.cause if culprit is not None else UNKNOWN, culprit=culprit, how="poison", poison=replay
    )


def _row_incident(at: _Step) -> Incident | None:
    """The incident at a step, from its recorded tensors alone; None if it has none, or the loss scaler handles it."""
    if not at.rows:
        return _unrecorded_incident(at)
    bad = dict(Counter(r.kind for r in at.rows if r.bad))
    weight = next((r for r in at.rows if r.kind == "weight" and r.bad and not r.mask_like), None)
    if weight is not None:
        return replace(_bad_weights_incident(at, weight), bad=bad)
    skipped = at.facts is not None and at.facts.skipped
    if (forward := _forward_incident(at)) is not None:
        return None if skipped and _scaled_loss_overflow(forward) else replace(forward, bad=bad)
    if skipped:
        return None
    backward = _backward_incident(at) or _after_backward_incident(at)
    if backward is not None:
        return replace(backward, bad=bad)
    return None if not bad else _unrecorded_incident(at)


def _forward_incident(at: _Step) -> Incident | None:
    """The incident whose origin is a forward tensor or the loss; None if all of them are finite or masks."""
    rows, facts = at.rows, at.facts
    losses = [r for r in rows if r.kind == "loss"]
    loss_is_finite = not any(r.bad for r in losses) and not (facts is not None and facts.loss_is_bad)
    loss_checked = facts is not None and facts.complete and not facts.inference
    loss_is_finite = loss_is_finite and (bool(losses) or loss_checked)
    candidates = [r for r in rows if r.kind in (*FORWARD_KINDS, "loss")]
    row, masks = suspicious(candidates, at.reference, loss_is_finite=loss_is_finite)
    if row is None:
        return None
    origin = locate_forward(row, rows, masks, at.view.module_classes)
    return at.incident(
        origin.phase,
        forward_cause(origin, rows, _earlier_weights(at, origin), replay_at(at.view, at.process, at.number)),
        origin,
        path=tuple(path_to(_forward_path(at, origin), row)),
        history=tuple(at.reference.get(row.key, ())),
    )


def _forward_path(at: _Step, origin: Origin) -> list[TensorRow]:
    """The step's forward tensors; for a bad batch only those of its root and of roots with parameters.

    Roots without parameters may be transforms of samples.
    """
    path = [r for r in at.rows if r.kind in (*FORWARD_KINDS, "loss")]
    if origin.phase is not Phase.DATA:
        return path
    models = {root.get("name") for root in at.view.facts(at.process).get("roots") or () if root.get("parameters")}
    return [r for r in path if r.root == origin.root or r.root in models]


def _earlier_weights(at: _Step, origin: Origin) -> list[TensorRow]:
    """The origin module's weights and updates on the last earlier step that recorded its weights; may be empty."""
    for before in reversed([f.step for f in at.earlier if f.sampled][-_LAST_UPDATE:]):
        rows = [r for r in at.view.rows(at.process, before) if (r.root, r.module) == (origin.root, origin.module)]
        if any(r.kind == "weight" for r in rows):
            return [r for r in rows if r.kind in ("weight", "update")]
    return []


def _scaled_loss_overflow(incident: Incident) -> bool:
    """Whether an FP16 loss overflowed only because it was multiplied by the loss scale; a backoff mends that."""
    row = incident.origin.row if incident.origin else None
    return (
        row is not None and row.kind == "loss" and row.dtype == "float16" and (row.scale or 1.0) > 1.0 and not row.nan
    )


def _backward_incident(at: _Step) -> Incident | None:
    """The incident whose origin is a gradient of the backward pass; None if all of them are finite."""
    gradients = [r for r in at.rows if r.kind in BACKWARD_KINDS]
    row, _ = suspicious(gradients, at.reference, loss_is_finite=False)
    if row is None:
        return None
    origin = locate_backward(row, at.rows, at.view.module_classes)
    scale = at.facts.loss_scale if at.facts is not None else None
    path = path_to([r for r in at.rows if r.kind in (*FORWARD_KINDS, "loss", *BACKWARD_KINDS)], row)
    return at.incident(
        Phase.BACKWARD,
        backward_cause(origin, at.rows, scale),
        origin,
        path=tuple(path),
        history=tuple(at.reference.get(row.key, ())),
    )


def _after_backward_incident(at: _Step) -> Incident | None:
    """The incident of a step with finite local gradients; None if optimizer inputs and updates are also finite."""
    optimizer_input = next((r for r in at.rows if r.kind == "weight_grad_step" and r.bad), None)
    if optimizer_input is not None:
        origin = locate_backward(optimizer_input, at.rows, at.view.module_classes)
        return at.incident(Phase.BACKWARD, UNKNOWN, origin, path=_parameter_path(at.rows, optimizer_input))
    update = next((r for r in at.rows if r.kind == "update" and r.bad), None)
    return None if update is None else _optimizer_incident(at, update)


def _parameter_path(rows: Sequence[TensorRow], row: TensorRow) -> tuple[TensorRow, ...]:
    """The rows of one parameter in a step: weight, local gradient, gradient that the optimizer received, update."""
    order = ["weight", "weight_grad", "weight_grad_step", "update"]
    parameter_rows = [r for r in rows if r.kind in order and r.owner == row.owner]
    return tuple(sorted(parameter_rows, key=lambda r: (r.position, order.index(r.kind)))) or (row,)


def _optimizer_incident(at: _Step, row: TensorRow) -> Incident:
    """The incident if the optimizer made ``row``, the step's update or the next step's weight, non-finite."""
    cause = UNKNOWN
    rates = [BadSetting(group, "lr", rate) for group, rate in (at.facts.bad_rates if at.facts is not None else ())]
    if rates:  # the log does not say which group the weight is in
        cause = Cause("other", 0.9, settings_words(rates))
    elif flushed := flushed_eps(at.view, row.dtype):
        cause = Cause("optimizer-division-by-zero", 0.85, flushed)
    elif row.nan == 0 and row.inf:
        cause = Cause("optimizer-overflow", 0.8, "finite gradients became infinite weights")
    path = _parameter_path(at.rows, row)
    return at.incident(Phase.OPTIMIZER, cause, _origin_in_optimizer(row), path=path, how="optimizer")


def _origin_in_optimizer(row: TensorRow) -> Origin:
    return Origin(row, Phase.OPTIMIZER, row.root, row.module, row.module_class, "module", None)


def _bad_weights_incident(at: _Step, row: TensorRow) -> Incident:
    """The incident of a step that begins with a non-finite weight.

    It was non-finite from the start, or code between two steps made it so, or an earlier optimizer step did and the log
    lacks the update. In the last case the incident belongs to that earlier step.
    """
    cause = Cause("nonfinite-weights", 0.9, "the weights are non-finite before the step's forward pass")
    between = at.incident(Phase.OPTIMIZER, cause, _origin_in_optimizer(row), path=(row,), how="between")
    if not at.earlier:
        return replace(between, phase=Phase.FORWARD, how="start")
    for facts in reversed(at.earlier[-_LAST_UPDATE:]):  # the last step may be one of another optimizer
        parameter_rows = [r for r in at.view.rows(at.process, facts.step) if r.owner == row.owner]
        if any(r.kind == "weight" for r in parameter_rows):
            break
    previous = next((r for r in parameter_rows if r.kind == "weight"), None)
    if previous is None or any(r.bad or r.kind == "update" for r in parameter_rows):
        return between
    incident = _optimizer_incident(replace(at, number=facts.step), row)
    return replace(incident, path=(previous, *[r for r in parameter_rows if r.kind.startswith("weight_grad")], row))


def _unrecorded_incident(at: _Step) -> Incident:
    """The incident of a step whose tensors are not in the log: its phase follows from the non-finite kinds."""
    sampled, kinds = at.facts is not None and at.facts.sampled, at.bad_steps[at.number]
    why = "the step's tensors are not in the log" if sampled else "the step was not sampled"
    if "loss" in kinds:
        return at.incident(Phase.LOSS, UNKNOWN, unrecorded=why)
    if kinds & GRADIENTS:
        return at.incident(Phase.BACKWARD, UNKNOWN, unrecorded=why)
    return at.incident(Phase.OPTIMIZER, UNKNOWN, unrecorded=why, how="between")
