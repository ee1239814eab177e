"""The loss scale over the steps of a run, per process and scaler, and which skipped steps are probes of a scaler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView


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
    return len(enabled_scalers(view, process)) > 1


def enabled_scalers(view: RunView, process: Process) -> list[Mapping[str, Any]]:
    """Return the recorded settings of a process's loss scalers, without those made with ``enabled=False``."""
    return [s for s in view.facts(process).get("scalers") or () if s.get("enabled") is not False]


def joined_updates(steps: Iterable[StepFacts]) -> Sequence[StepFacts]:
    """Merge the step attempts of each scaler update into one: a skipped one, sampled if possible, or else the first."""
    return [max(group, key=lambda s: (s.skipped, s.skipped and s.sampled)) for group in attempts_by_update(steps)]


def attempts_by_update(steps: Iterable[StepFacts]) -> list[list[StepFacts]]:
    """Group successive step attempts without a ``scaler.update()`` between them.

    Such attempts have different optimizers, and the same known scale and growth tracker.
    """
    groups: list[list[StepFacts]] = []
    for facts in steps:
        last, state = groups[-1] if groups else [], (facts.loss_scale, facts.growth_tracker)
        same = None not in state and any((s.loss_scale, s.growth_tracker) == state for s in last)
        if same and all(s.optimizer != facts.optimizer for s in last):
            last.append(facts)
        else:
            groups.append([facts])
    return groups


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
