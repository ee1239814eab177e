"""The course of a loss scale over a run, as the PD3xx rules share it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from precdoctor.diagnosis.rows import number
from precdoctor.diagnosis.view import Process, RunView, StepFacts

#: What ``torch.amp.GradScaler`` does when nothing is said.
STOCK_INTERVAL = 2000


def scaled_steps(view: RunView) -> Mapping[Process, Sequence[StepFacts]]:
    """Per process the complete steps that ran under a loss scale; processes without any are left out."""
    found = {p: [s for s in steps if s.loss_scale is not None and s.complete] for p, steps in view.timeline.items()}
    return {p: steps for p, steps in found.items() if steps}


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
