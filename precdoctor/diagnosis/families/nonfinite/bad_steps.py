"""Finds the non-finite steps of a run, from the step columns, the tensor rows, the events and the replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from precdoctor.diagnosis.analyses.healthy_steps import is_well, reference_of
from precdoctor.diagnosis.analyses.origin import suspicious
from precdoctor.diagnosis.analyses.replays import poisoned_steps, replay_at, replayed_steps
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, TRIGGER_KINDS, number
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView, remembered

#: Maximum number of steps of an inference run to check for a non-finite output; the first ones explain the others.
_MAX_OUTPUTS = 64
#: Kinds of tensors whose overflow a loss scaler handles.
GRADIENTS = frozenset({"weight_grad", "weight_grad_step"})


@remembered
def incident_steps(view: RunView) -> Mapping[Process, Mapping[int, frozenset[str]]]:
    """The non-finite steps of each process that no loss scaler handled, each with the kinds of its non-finite tensors.

    The loss, gradients and weights count, and what a replay found. If all of them were finite, so do poisoned buffers
    and optimizer state (as ``buffer``), and outputs of inference and of an incomplete last step.
    """
    kinds = _recorded_kinds(view)
    for process, steps in view.timeline.items():
        by_step = kinds.setdefault(process, {})
        for facts in steps:
            if facts.step not in by_step and not is_well(view, process, facts):
                by_step[facts.step] = _unsampled_kinds(view, process, facts)
        for step in [s for s, k in by_step.items() if _scaler_handled(view.step_facts(process, s), k)]:
            if not _scaler_cannot_help(view, process, step):
                del by_step[step]
        for step in poisoned_steps(view, process):
            by_step.setdefault(step, frozenset({"buffer"}))
        for step, kind in replayed_steps(view, process).items():
            by_step.setdefault(step, frozenset({kind}))
        for step in _nonfinite_outputs(view, process, [f.step for f in steps if f.inference and f.sampled]):
            by_step.setdefault(step, frozenset({"output"}))
        if steps and not steps[-1].complete and steps[-1].step not in by_step and _is_bad_end(view, process, steps[-1]):
            by_step[steps[-1].step] = frozenset({"output"})
    return {p: dict(sorted(m.items())) for p, m in kinds.items()}


def episodes(
    view: RunView, process: Process, order: Sequence[int], bad_steps: Mapping[int, frozenset[str]]
) -> Iterator[Sequence[int]]:
    """Yield the consecutive bad steps of a process, divided where the loss fails beside the gradients.

    A script that mends its gradients (``nan_to_num_``) has bad steps all along. Its loss fails for a reason of its own
    if all that the step before left is finite.

    Args:
        order: all steps of the process.
        bad_steps: its bad steps, with the kinds of their non-finite tensors.
    """
    for steps in [list(group) for bad, group in groupby(order, bad_steps.__contains__) if bad]:
        first = next((i for i, step in enumerate(steps) if "loss" in bad_steps[step]), 0)
        replay = replay_at(view, process, steps[first]) if first else None
        divided = replay is not None and replay.finite_before
        yield from [steps[:first], steps[first:]] if divided else [steps]


def _recorded_kinds(view: RunView) -> dict[Process, dict[int, frozenset[str]]]:
    """The kinds of non-finite tensors by step, from the rows. A weight with only ``-inf`` is a mask and not counted."""
    kinds: dict[Process, dict[int, frozenset[str]]] = {}
    for r in view.bad:
        masks = r["masks"] if r["kind"] == "weight" else 0
        if r["kind"] in TRIGGER_KINDS and r["tensors"] > masks:
            by_step = kinds.setdefault(Process.of(r), {})
            by_step[r["step"]] = by_step.get(r["step"], frozenset()) | {r["kind"]}
    return kinds


def _unsampled_kinds(view: RunView, process: Process, facts: StepFacts) -> frozenset[str]:
    """The kinds of non-finite tensors on a step without such rows: from its ``nonfinite`` event, else its columns."""
    for event in view.nonfinite_events:
        if number(event.get("step")) == facts.step and number(event.get("rank")) == process.rank:
            event_kinds = event["data"].get("kinds")
            if isinstance(event_kinds, list) and event_kinds:
                return frozenset(str(k) for k in event_kinds)
    return frozenset({"loss"} if facts.loss_is_bad else {"weight_grad"})


def _scaler_handled(facts: StepFacts | None, kinds: frozenset[str]) -> bool:
    """Whether the loss scaler handled the overflow: it skipped the step, or the optimizer never got the gradient.

    In a GAN, non-finite gradients of the discriminator stay after its skipped step, and the generator's backward pass
    adds to them. They do no harm at the generator's step: the scaler found all gradients of its optimizer finite.
    """
    if facts is None:
        return False
    return (facts.skipped and kinds <= GRADIENTS) or (facts.found_inf is False and kinds <= {"weight_grad"})


def _scaler_cannot_help(view: RunView, process: Process, step: int) -> bool:
    """Whether the replay of a skipped step shows a cause that a smaller loss scale would not mend."""
    culprit = culprit_at(view, process, step)
    return culprit is not None and culprit.cause.name not in (None, "loss-scale-overflow", "other")


def _is_bad_end(view: RunView, process: Process, facts: StepFacts) -> bool:
    """Whether the forward pass of the incomplete last step made a non-finite tensor that is not a mask.

    A training loop that checks ``isfinite(loss)`` and raises leaves its last step incomplete, without a backward pass.
    """
    rows = [r for r in view.rows(process, facts.step) if r.kind in FORWARD_KINDS and r.phase != "recompute"]
    if not any(r.bad and not r.mask_like and r.kind != "batch" for r in rows):
        return False
    reference = reference_of(view, process, facts.step, frozenset({facts.step}))
    return suspicious(rows, reference, loss_is_finite=False)[0] is not None


def _nonfinite_outputs(view: RunView, process: Process, steps: Sequence[int]) -> list[int]:
    """The sampled inference ``steps`` on which a model's last output (its answer) is non-finite and no mask."""
    if not steps:
        return []
    bad_output_steps = {
        r["step"] for r in view.bad if (r["rank"], r["attempt"], r["kind"]) == (process.rank, process.attempt, "output")
    }
    result = []
    for step in sorted(bad_output_steps.intersection(steps))[:_MAX_OUTPUTS]:
        last = {r.root: r for r in view.rows(process, step) if r.kind == "output"}
        if any(r.bad and not r.mask_like for r in last.values()):
            result.append(step)
    return result
