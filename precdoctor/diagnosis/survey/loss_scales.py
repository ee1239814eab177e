"""The course of a loss scale over a run, as the PD3xx rules share it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: What ``torch.amp.GradScaler`` does when nothing is said.
STOCK_INTERVAL = 2000


def scaled_steps(view: RunView) -> list[tuple[Process, Sequence[StepFacts]]]:
    """Per process and scaler the complete steps that ran under a loss scale; processes without any are left out.

    The attempts of several optimizers that share a scaler are one step here: a bad batch is one backoff, however many
    optimizers were to make use of it. Where there are several scalers, as in GANs, each optimizer is taken to have its
    own: the log does not tell whose scale it was.
    """
    return [(p, joined_updates(course)) for p in view.timeline for course in _by_scaler(view, p) if course]


def _by_scaler(view: RunView, process: Process) -> Iterable[list[StepFacts]]:
    scaled = [s for s in view.timeline[process] if s.loss_scale is not None and s.complete]
    if not has_several_scalers(view, process):
        return [scaled]
    return ([s for s in scaled if s.optimizer == name] for name in dict.fromkeys(s.optimizer for s in scaled))


def has_several_scalers(view: RunView, process: Process) -> bool:
    """Whether a process scaled with more than one of them."""
    return sum(s.get("enabled", True) is not False for s in view.facts(process).get("scalers") or ()) > 1


def joined_updates(steps: Iterable[StepFacts]) -> Sequence[StepFacts]:
    """Each run of attempts between which no ``scaler.update()`` lies as one: the skipped one among them, if any.

    As in :mod:`~precdoctor.diagnosis.offline.replay.updates`, they are told apart by another optimizer and a state that
    is still the same.
    """
    joined: list[StepFacts] = []
    optimizers: set[str] = set()
    for facts in steps:
        last = joined[-1] if joined else None
        if last is not None and facts.optimizer not in optimizers and _same_state(last, facts):
            optimizers.add(facts.optimizer)
            if facts.skipped and not (last.skipped and (last.sampled or not facts.sampled)):
                joined[-1] = facts
            continue
        joined.append(facts)
        optimizers = {facts.optimizer}
    return joined


def _same_state(a: StepFacts, b: StepFacts) -> bool:
    """Whether a scaler object was in the same state at both."""
    known = b.growth_tracker is not None
    return known and (a.loss_scale, a.growth_tracker) == (b.loss_scale, b.growth_tracker)


def after_calibration(steps: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """From the first step that was not skipped on: until there a fresh scaler finds its level."""
    return steps[next((i for i, s in enumerate(steps) if not s.skipped), len(steps)) :]


def growth_interval(view: RunView, process: Process) -> float | None:
    """The shortest growth interval among the process's scalers; None when no scaler is on record."""
    given = [number(s.get("growth_interval")) for s in view.facts(process).get("scalers") or ()]
    return min((i for i in given if i), default=None)


def is_dynamic(steps: Sequence[StepFacts]) -> bool:
    """Whether a scaler object was at work, not a constant written by hand."""
    return any(s.growth_tracker is not None for s in steps)


def probes(steps: Sequence[StepFacts]) -> list[StepFacts]:
    """The skipped steps whose scale the scaler had just grown to, one growth above a level that was clean."""
    found, clean = [], math.inf
    for facts in steps:
        scale = facts.loss_scale or 0.0
        if facts.skipped:
            if scale > clean:
                found.append(facts)
            clean = math.inf
        else:
            clean = min(clean, scale)
    return found
