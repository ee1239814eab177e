"""Which steps of a run went wrong, and how its tensors look on the steps that did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from precdoctor.diagnosis.examination import culprit_at
from precdoctor.diagnosis.examined import poisoned_steps, traced_steps
from precdoctor.diagnosis.origin import Reference, Sighting, suspicious
from precdoctor.diagnosis.records import records
from precdoctor.diagnosis.rows import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    TRIGGER_KINDS,
    Key,
    TensorRow,
    known_format,
    number,
)
from precdoctor.diagnosis.step_facts import StepFacts
from precdoctor.diagnosis.view import BAD_COUNTS, Process, RunView

#: Healthy steps an incident is compared with: enough to see a mask that only some batches have.
REFERENCE_STEPS = 8
#: Steps of an inference run looked into for a bad answer; the first ones explain the others.
_MAX_ANSWERS = 64
#: Kinds whose overflow a loss scaler takes care of.
GRADIENTS = frozenset({"weight_grad", "weight_grad_step"})


def incident_steps(view: RunView) -> Mapping[Process, Mapping[int, frozenset[str]]]:
    """Per process the steps with a non-finite loss, gradient or weight no loss scaler took care of, and the kinds."""
    return view.remember("incident-steps", lambda: _incident_steps(view))


def _incident_steps(view: RunView) -> dict[Process, dict[int, frozenset[str]]]:
    kinds = _recorded_kinds(view)
    for process, steps in view.timeline.items():
        mine = kinds.setdefault(process, {})
        for facts in steps:
            if facts.step not in mine and not is_well(view, process, facts):
                mine[facts.step] = _announced_kinds(view, process, facts)
        for step in [s for s, k in mine.items() if _handled(view.step_facts(process, s), k)]:
            if not _scaler_cannot_help(view, process, step):
                del mine[step]
        for step in poisoned_steps(view, process):
            mine.setdefault(step, frozenset({"buffer"}))
        for step, kind in traced_steps(view, process).items():
            mine.setdefault(step, frozenset({kind}))
        for step in _bad_answers(view, process, [f.step for f in steps if f.inference and f.sampled]):
            mine.setdefault(step, frozenset({"output"}))
        if steps and not steps[-1].complete and steps[-1].step not in mine and _died_of_it(view, process, steps[-1]):
            mine[steps[-1].step] = frozenset({"output"})
    return {p: {s: frozenset(k) for s, k in sorted(m.items())} for p, m in kinds.items()}


def is_well(view: RunView, process: Process, facts: StepFacts) -> bool:
    """Whether all that was counted as non-finite at the step are masks kept as parameters."""
    masks = view.remember("weight-masks", lambda: _weight_masks(view))
    return not facts.loss_is_bad and facts.non_finite <= masks[process, facts.step]


def _weight_masks(view: RunView) -> Counter[tuple[Process, int]]:
    """Per process and step the weights that hold nothing but ``-inf`` beside what is finite."""
    masks: Counter[tuple[Process, int]] = Counter()
    for frame in view.scan(["kind", *BAD_COUNTS], ("weight",), bad=True):
        mine = frame.loc[_is_mask(frame), ["rank", "attempt", "step"]]
        masks.update(
            (Process(int(rank), int(attempt)), int(step))
            for rank, attempt, step in mine.itertuples(index=False, name=None)
        )
    return masks


def _is_mask(frame: pd.DataFrame) -> pd.Series[bool]:
    return (frame["kind"] == "weight") & (frame["nan"] == 0) & (frame["pos_inf"] == 0)


def _recorded_kinds(view: RunView) -> dict[Process, dict[int, frozenset[str]]]:
    """From the tensors table; a weight that holds nothing but ``-inf`` is a mask kept as a parameter."""
    kinds: dict[Process, dict[int, frozenset[str]]] = {}
    for frame in view.scan(["kind", *BAD_COUNTS], TRIGGER_KINDS, bad=True):
        chosen = frame.loc[~_is_mask(frame), ["rank", "attempt", "step", "kind"]].drop_duplicates()
        for rank, attempt, step, kind in chosen.itertuples(index=False, name=None):
            mine = kinds.setdefault(Process(int(rank), int(attempt)), {})
            mine[int(step)] = mine.get(int(step), frozenset()) | {str(kind)}
    return kinds


def _announced_kinds(view: RunView, process: Process, facts: StepFacts) -> frozenset[str]:
    """Of a step without full statistics: from its ``nonfinite`` event, else from the step's own columns."""
    for event in view.remember("nonfinite-events", lambda: view.events_of("nonfinite")):
        if number(event.get("step")) == facts.step and number(event.get("rank")) == process.rank:
            listed = event["data"].get("kinds")
            if isinstance(listed, list) and listed:
                return frozenset(str(k) for k in listed)
    return frozenset({"loss"} if facts.loss_is_bad else {"weight_grad"})


def _handled(facts: StepFacts | None, kinds: frozenset[str]) -> bool:
    """A gradient overflow for which the scaler skipped the step is the scaler doing its work.

    So is one that the optimizer of this step was not given: the scaler has looked at all that it was. In a GAN the
    discriminator's gradients of a skipped step lie about, and the generator's backward pass adds to them.
    """
    if facts is None:
        return False
    return (facts.skipped and kinds <= GRADIENTS) or (facts.found_inf is False and kinds <= {"weight_grad"})


def _scaler_cannot_help(view: RunView, process: Process, step: int) -> bool:
    """Whether a closer look at a skipped step found something no smaller scale would mend."""
    culprit = culprit_at(view, process, step)
    return culprit is not None and culprit.cause.name not in (None, "loss-scale-overflow", "other")


def _died_of_it(view: RunView, process: Process, facts: StepFacts) -> bool:
    """Whether the step in which the run ended made something non-finite that is not a mask.

    Training loops that check ``isfinite(loss)`` and raise never hand the bad loss to ``backward``.
    """
    rows = [r for r in view.rows(process, facts.step) if r.kind in FORWARD_KINDS and r.phase != "recompute"]
    return any(r.bad and not r.mask_like and r.kind != "batch" for r in rows) and _suspect(
        rows, reference_of(view, process, facts.step, frozenset({facts.step})), loss_is_finite=False
    )


def _bad_answers(view: RunView, process: Process, steps: Sequence[int]) -> list[int]:
    """Steps of an inference run on which what a model made last is non-finite and no mask: its answer, most likely."""
    if not steps:
        return []
    made: set[int] = set()
    for frame in view.scan(["kind", *BAD_COUNTS], ("output",), bad=True):
        mine = frame[(frame["rank"] == process.rank) & (frame["attempt"] == process.attempt)]
        made.update(map(int, mine["step"].unique()))
    found = []
    for step in sorted(made.intersection(steps))[:_MAX_ANSWERS]:
        last = {r.root: r for r in view.rows(process, step) if r.kind == "output"}
        if any(r.bad and not r.mask_like for r in last.values()):
            found.append(step)
    return found


def _suspect(rows: Sequence[TensorRow], reference: Reference, *, loss_is_finite: bool) -> bool:
    return suspicious(rows, reference, loss_is_finite=loss_is_finite)[0] is not None


def reference_of(view: RunView, process: Process, step: int, exclude: frozenset[int]) -> Reference:
    """How each tensor looked on the healthy steps nearest before ``step`` (after it, when there is none before).

    A step the scaler skipped may have been sick in its forward pass, and stands in only where there is no other.
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
