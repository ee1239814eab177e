"""Which steps count as healthy, and the range of each tensor on the healthy steps nearest to a step."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.origin import Reference, Sighting
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, Key, known_format, number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import BAD_COUNTS, Process, RunView

#: Healthy steps an incident is compared with: enough to see a mask that only some batches have.
REFERENCE_STEPS = 8


def is_well(view: RunView, process: Process, facts: StepFacts) -> bool:
    """Whether the loss is finite, and masks stored as parameters are the only non-finite tensors of the step."""
    masks = view.remember("weight-masks", lambda: _weight_masks(view))
    return not facts.loss_is_bad and facts.non_finite <= masks[process, facts.step]


def _weight_masks(view: RunView) -> Counter[tuple[Process, int]]:
    """Per process and step the number of weights that hold ``-inf`` and no other non-finite value."""
    masks: Counter[tuple[Process, int]] = Counter()
    for r in view.bad:
        if r["kind"] == "weight":
            masks[Process(r["rank"], r["attempt"]), r["step"]] += r["masks"]
    return masks


def reference_of(view: RunView, process: Process, step: int, exclude: frozenset[int]) -> Reference:
    """Each tensor on the healthy steps nearest before ``step``; after it, if there are none before.

    A step that the loss scaler skipped counts only if there is no other: its forward pass may have been non-finite.
    """
    sampled = [f for f in view.timeline.get(process, ()) if f.sampled and f.complete and f.step not in exclude]
    healthy = [f.step for f in sampled if is_well(view, process, f)]
    healthy = healthy or [f.step for f in sampled if not f.loss_is_bad and f.skipped]
    chosen = [s for s in healthy if s < step][-REFERENCE_STEPS:] or [s for s in healthy if s > step][:REFERENCE_STEPS]
    seen: dict[Key, list[Sighting]] = {}
    if not chosen:
        return seen
    columns = ["root", "module", "kind", "name", "call", "dtype", "numel", *BAD_COUNTS, "amax"]
    for frame in view.scan(columns, (*FORWARD_KINDS, "loss", *BACKWARD_KINDS), steps=chosen):
        mine = frame[(frame["rank"] == process.rank) & (frame["attempt"] == process.attempt)]
        for key, sighting in _sightings(mine):
            seen.setdefault(key, []).append(sighting)
    return {key: tuple(sorted(s, key=lambda x: x.step)) for key, s in seen.items()}


def _sightings(frame: pd.DataFrame) -> list[tuple[Key, Sighting]]:
    result = []
    for r in records(frame):
        key = (str(r["root"]), str(r["module"]), str(r["kind"]), str(r["name"]), int(r["call"]))
        badness = frozenset(c for c in BAD_COUNTS if r[c] > 0)
        amax, fmt = number(r["amax"]), known_format(str(r["dtype"]))
        headroom = fmt.headroom(amax) if fmt is not None and amax else None
        share = float(r["neg_inf"]) / max(1, int(r["numel"]))
        result.append((key, Sighting(int(r["step"]), badness, share, amax, headroom)))
    return result
