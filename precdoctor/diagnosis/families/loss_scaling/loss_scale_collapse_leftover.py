"""Gradients of a skipped step that are not zeroed: the next ones are added to an Inf, and no step is taken any more.

Scripts that skip by themselves tend to leave out ``optimizer.zero_grad()`` together with ``optimizer.step()``. What was
once non-finite then stays so, element by element, whatever the batch and the loss scale are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, Key, TensorRow
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Steps behind the first one whose tensors are looked at, evenly spread.
_EXAMINED = 16
#: Modules whose parameters get sums of products of what is finite: smaller terms cannot overflow where larger ones did
#: not, nor is there a root or a quotient in them.
_PLAIN = re.compile(r"(?:Linear|(?:Lazy)?Conv(?:Transpose)?[123]d|(?:Layer|Group|RMS|(?:Sync)?Batch)Norm(?:[123]d)?)$")
#: By how much what comes down has become smaller since, at least.
_SMALLER = 8.0


@dataclass(frozen=True)
class KeptGradients:
    """Attributes:
    first: the step that overflowed, whose gradients were kept.
    skips: steps skipped since because of that, to the end of the run.
    weights: whose gradient has been non-finite ever since.
    """

    first: int
    skips: int
    weights: int

    @property
    def words(self) -> str:
        """A sentence for a message."""
        return (
            f"Gradients are not zeroed when a step is skipped: on all {plural(self.skips, 'step')} behind step "
            f"{self.first} the gradients of {plural(self.weights, 'weight')} hold the non-finite elements they had "
            "there, although what comes down the backward pass is finite. New gradients are added to those, so that no "
            "step can be taken any more."
        )

    def prescription(self, skipped: int) -> Prescription:
        """``skipped``: steps of the run that were."""
        return Prescription(
            title=f"`zero_grad()` after skipped steps, too: skipped steps {skipped} -> {skipped - self.skips}, if no "
            "other batch overflows",
            change={"zero_grad": {"from": "after steps that are taken", "to": "after every step"}},
            predicted={"skipped_steps": {"from": skipped, "to": skipped - self.skips}},
            snippet=(
                "scaler.step(optimizer)  # skips by itself what is not finite\n"
                "scaler.update()\n"
                "optimizer.zero_grad(set_to_none=True)  # under no `if`: a skipped step leaves gradients as well\n"
            ),
        )


def kept_gradients(view: RunView, process: Process, steps: Sequence[StepFacts], least: float) -> KeptGradients | None:
    """Whether that is why the run's last steps were skipped; None where it is not, or the log does not show it.

    Non-finite elements that a layer makes anew differ in number from batch to batch, go away as the scale falls, or
    come with a non-finite activation or gradient of one. Those of a kept gradient never become fewer; and either there
    was such a tensor on the first skipped step and on none since, or what comes down has become so small with the scale
    that a sum of products, as the gradient of a linear layer is, cannot overflow any more.

    Args:
        view: the run.
        process: whose steps they are.
        steps: in order; those skipped at the end are judged.
        least: so many of them at least behind the first.
    """
    tail = steps[next((i + 1 for i in reversed(range(len(steps))) if not steps[i].skipped), 0) :]
    later = [s.step for s in tail[1:] if s.sampled]
    if len(tail) - 1 < least or len(later) < least or not tail[0].sampled:
        return None
    begun = view.rows(process, tail[0].step)
    kept = _non_finite(begun)
    if not kept:
        return None
    bad, rows = dict(kept), begun
    for step in later[:: max(1, len(later) // _EXAMINED)]:
        rows = view.rows(process, step)
        now = _non_finite(rows)
        if _makes_its_own(rows) or any(now.get(key, 0) < count for key, count in bad.items()):
            return None
        bad |= now
    if not _makes_its_own(begun) and not _cannot_overflow(begun, rows):
        return None
    return KeptGradients(tail[0].step, len(tail) - 1, len(kept))


def _non_finite(rows: Sequence[TensorRow]) -> Mapping[Key, int]:
    """Elements by gradient, of weights that have any."""
    return {r.key: r.nan + r.pos_inf + r.neg_inf for r in rows if r.kind == "weight_grad" and r.bad}


def _makes_its_own(rows: Sequence[TensorRow]) -> bool:
    """Whether the step has non-finite values outside of weight gradients: masks of ``-inf`` apart."""
    forward = any(r.nan or r.pos_inf for r in rows if r.kind in FORWARD_KINDS)
    return forward or any(r.bad for r in rows if r.kind in ("loss", "grad_output"))


def _cannot_overflow(begun: Sequence[TensorRow], now: Sequence[TensorRow]) -> bool:
    """Whether a layer's gradient is non-finite although what comes down to it is far smaller than it was."""
    before, after = _sizes(begun), _sizes(now)
    shrunk = {place for place, amax in after.items() if _SMALLER * amax <= before.get(place, 0.0)}
    return any(
        _PLAIN.match(r.module_class) and r.name in ("weight", "bias") and (r.root, r.module) in shrunk
        for r in now
        if r.kind == "weight_grad" and r.bad
    )


def _sizes(rows: Sequence[TensorRow]) -> Mapping[tuple[str, str], float]:
    """The largest gradient, as it lies in memory, of each module's outputs."""
    sizes: dict[tuple[str, str], float] = {}
    for r in rows:
        if r.kind == "grad_output":
            sizes[r.root, r.module] = max(sizes.get((r.root, r.module), 0.0), r.amax or 0.0)
    return sizes
