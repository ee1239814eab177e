"""Which steps are healthy, and the range of each tensor on the healthy steps nearest to a given step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pandas as pd

from precdoctor.diagnosis.analyses.origin import Reference, Sighting
from precdoctor.diagnosis.survey.frames import keys
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, grouped, known_format, number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import BAD_COUNTS, Process, RunView, remembered

#: Number of healthy steps that an incident is compared with: enough to see a mask that only some batches have.
REFERENCE_STEPS = 8


def is_well(view: RunView, process: Process, facts: StepFacts) -> bool:
    """Return whether a step is healthy: no non-finite loss, and no non-finite tensor except weights that hold masks."""
    masks = _weight_masks(view)
    return not facts.loss_is_bad and facts.non_finite <= masks[process, facts.step]


def healthy_sampled_steps(view: RunView) -> Iterator[StepFacts]:
    """Yield the sampled healthy steps of each process whose rows the survey kept."""
    for process, steps in view.timeline.items():
        yield from (f for f in steps if f.sampled and view.survey.covers([f.step]) and is_well(view, process, f))


@remembered
def _weight_masks(view: RunView) -> Counter[tuple[Process, int]]:
    """Count, per process and step, the weights that hold ``-inf`` and no other non-finite value."""
    masks: Counter[tuple[Process, int]] = Counter()
    for r in view.bad:
        if r["kind"] == "weight":
            masks[Process.of(r), r["step"]] += r["masks"]
    return masks


def reference_of(view: RunView, process: Process, step: int, exclude: frozenset[int]) -> Reference:
    """Return the sightings of each tensor on the nearest healthy steps before ``step``, or after it if none is before.

    Without any healthy step, skipped steps with a finite loss are taken. The steps in ``exclude``, such as those of
    other incidents, never are.
    """
    sampled = [f for f in view.timeline.get(process, ()) if f.sampled and f.complete and f.step not in exclude]
    healthy = [f.step for f in sampled if is_well(view, process, f)]
    healthy = healthy or [f.step for f in sampled if not f.loss_is_bad and f.skipped]
    chosen = [s for s in healthy if s < step][-REFERENCE_STEPS:] or [s for s in healthy if s > step][:REFERENCE_STEPS]
    if not chosen:
        return {}
    where = [("rank", "==", process.rank), ("attempt", "==", process.attempt)]
    kinds, columns = (*FORWARD_KINDS, "loss", *BACKWARD_KINDS), ("dtype", "numel", *BAD_COUNTS, "amax")
    frame = view.measured((), kinds, columns=columns, steps=chosen, where=where).sort_values("step", kind="stable")
    return grouped(zip(keys(frame), _sightings(frame), strict=True))


def _sightings(frame: pd.DataFrame) -> Iterator[Sighting]:
    columns = (frame[c].tolist() for c in ("step", "dtype", "numel", "amax", *BAD_COUNTS))
    for step, dtype, numel, amax, *counts in zip(*columns, strict=True):
        badness = frozenset(name for name, count in zip(BAD_COUNTS, counts, strict=True) if count > 0)
        fmt, known = known_format(dtype), number(amax)
        headroom = fmt.headroom(known) if fmt is not None and known else None
        yield Sighting(step, badness, counts[-1] / max(1, numel), known, headroom)
