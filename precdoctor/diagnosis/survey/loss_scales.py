"""The loss scale over the steps of a run, per process and scaler, and which skipped steps are probes of a scaler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Default ``growth_interval`` of ``torch.amp.GradScaler``, in steps.
STOCK_INTERVAL = 2000


def scaled_steps(view: RunView) -> list[tuple[Process, Sequence[StepFacts]]]:
    """Return the complete steps under a loss scale for each process and scaler; processes without any are left out.

    Step attempts of several optimizers that share a scaler count as one step, because a bad batch is one backoff. With
    several scalers, as in GANs, each optimizer is assumed to have its own: the log does not record the assignment.
    """
    return [(p, joined_updates(course)) for p in view.timeline for course in _by_scaler(view, p) if course]


def _by_scaler(view: RunView, process: Process) -> Iterable[list[StepFacts]]:
    scaled = [s for s in view.timeline[process] if s.loss_scale is not None and s.complete]
    if not has_several_scalers(view, process):
        return [scaled]
    return ([s for s in scaled if s.optimizer == name] for name in dict.fromkeys(s.optimizer for s in scaled))


def has_several_scalers(view: RunView, process: Process) -> bool:
    """Return whether a process used more than one enabled scaler."""
    return sum(s.get("enabled", True) is not False for s in view.facts(process).get("scalers") or ()) > 1


def joined_updates(steps: Iterable[StepFacts]) -> Sequence[StepFacts]:
    """Merge step attempts without a ``scaler.update()`` between them into one: a skipped one if there is any.

    Such attempts have different optimizers and the same scaler state; see also
    :mod:`~precdoctor.diagnosis.offline.replay.updates`.
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
    """Return whether scale and growth tracker were equal at both steps; False without a growth tracker."""
    known = b.growth_tracker is not None
    return known and (a.loss_scale, a.growth_tracker) == (b.loss_scale, b.growth_tracker)


def after_calibration(steps: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """Drop the skipped steps at the start, on which a fresh scaler searches its level."""
    return steps[next((i for i, s in enumerate(steps) if not s.skipped), len(steps)) :]


def growth_interval(view: RunView, process: Process) -> float | None:
    """Return the shortest growth interval among the process's scalers, in steps; None without a recorded scaler."""
    given = [number(s.get("growth_interval")) for s in view.facts(process).get("scalers") or ()]
    return min((i for i in given if i), default=None)


def is_dynamic(steps: Sequence[StepFacts]) -> bool:
    """Return whether a scaler object set the scale, rather than a constant in the script."""
    return any(s.growth_tracker is not None for s in steps)


def probes(steps: Sequence[StepFacts]) -> list[StepFacts]:
    """Return the probes: skipped steps at a larger scale than some clean step since the previous skip."""
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
