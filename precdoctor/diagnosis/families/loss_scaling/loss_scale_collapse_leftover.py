"""PD301, leftover gradients: a skipped step does not zero its gradients, so every later step is skipped as well.

Scripts that skip steps by themselves tend to omit ``optimizer.zero_grad()`` together with ``optimizer.step()``. New
gradients are then added to an Inf, and the element stays non-finite whatever the batch and the loss scale.
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

#: Later steps are read evenly spread, fewer than twice this many; bounds the work.
_MAX_EXAMINED = 16
#: Modules whose parameter gradients are sums of products, without a root or a quotient: if large terms did not
#: overflow, smaller ones cannot.
_PLAIN = re.compile(r"(?:Linear|(?:Lazy)?Conv(?:Transpose)?[123]d|(?:Layer|Group|RMS|(?:Sync)?Batch)Norm(?:[123]d)?)$")
#: Minimum factor by which the new output gradients are smaller than at first: three backoffs. Chosen empirically.
_SHRINKAGE = 8.0


@dataclass(frozen=True)
class LeftoverGradients:
    """Gradients of an overflow that the script never zeroed.

    Attributes:
        first: the step that overflowed.
        skips: number of steps skipped after it, to the end of the run.
        weights: number of weights whose gradient has been non-finite since.
    """

    first: int
    skips: int
    weights: int

    @property
    def words(self) -> str:
        """A sentence for a message."""
        return (
            f"Skipped steps do not zero their gradients. On all {plural(self.skips, 'step')} behind step {self.first} "
            f"the gradients of {plural(self.weights, 'weight')} still hold the non-finite elements of that step. The "
            "gradients that arrive are finite, but they are added to those elements, so every step is skipped."
        )

    def prescription(self, skipped: int) -> Prescription:
        """Zero gradients also after skipped steps; ``skipped`` is the number of skipped steps of the run."""
        return Prescription(
            title=f"`zero_grad()` also after skipped steps: skipped steps {skipped} -> {skipped - self.skips}, if no "
            "other batch overflows",
            change={"zero_grad": {"from": "after steps that are taken", "to": "after every step"}},
            predicted={"skipped_steps": {"from": skipped, "to": skipped - self.skips}},
            snippet=(
                "scaler.step(optimizer)  # skips by itself if a gradient is not finite\n"
                "scaler.update()\n"
                "optimizer.zero_grad(set_to_none=True)  # under no `if`: a skipped step leaves gradients as well\n"
            ),
        )


def find_leftover_gradients(
    view: RunView, process: Process, steps: Sequence[StepFacts], least: float
) -> LeftoverGradients | None:
    """The leftover gradients that made the script skip the run's last steps; None if the log does not prove any.

    If a layer makes new non-finite elements on each step, their number differs from batch to batch, they disappear as
    the scale falls, or a non-finite activation or output gradient precedes them. Non-finite elements that are left over
    never become fewer, and nothing non-finite precedes them after the first skipped step. As a second proof, either
    something did precede them on that first step, or the output gradients have become so much smaller with the scale
    that a sum of products, as in a linear layer, can no longer overflow.

    Args:
        steps: the scaled steps of the process in order; the skipped ones at the end are examined.
        least: minimum number of skipped steps after the first of them, and of sampled ones among these.
    """
    tail = steps[next((i + 1 for i in reversed(range(len(steps))) if not steps[i].skipped), 0) :]
    later = [s.step for s in tail[1:] if s.sampled]
    if len(tail) - 1 < least or len(later) < least or not tail[0].sampled:
        return None
    first_rows = view.rows(process, tail[0].step)
    leftover = _non_finite(first_rows)
    if not leftover:
        return None
    bad, rows = dict(leftover), first_rows
    for step in later[:: max(1, len(later) // _MAX_EXAMINED)]:
        rows = view.rows(process, step)
        counts = _non_finite(rows)
        if _makes_nonfinite(rows) or any(counts.get(key, 0) < count for key, count in bad.items()):
            return None
        bad |= counts
    if not _makes_nonfinite(first_rows) and not _cannot_overflow(first_rows, rows):
        return None
    return LeftoverGradients(tail[0].step, len(tail) - 1, len(leftover))


def _non_finite(rows: Sequence[TensorRow]) -> Mapping[Key, int]:
    """The number of non-finite elements of each weight gradient that has any."""
    return {r.key: r.non_finite for r in rows if r.kind == "weight_grad" and r.bad}


def _makes_nonfinite(rows: Sequence[TensorRow]) -> bool:
    """Whether a step made non-finite values itself, outside of weight gradients; masks of ``-inf`` do not count."""
    forward = any(r.nan or r.pos_inf for r in rows if r.kind in FORWARD_KINDS)
    return forward or any(r.bad for r in rows if r.kind in ("loss", "grad_output"))


def _cannot_overflow(first_rows: Sequence[TensorRow], last_rows: Sequence[TensorRow]) -> bool:
    """Whether a plain layer's weight gradient is still non-finite, with a far smaller output gradient than at first."""
    before, after = _output_gradient_amax(first_rows), _output_gradient_amax(last_rows)
    shrunk = {place for place, amax in after.items() if _SHRINKAGE * amax <= before.get(place, 0.0)}
    return any(
        _PLAIN.match(r.module_class) and r.name in ("weight", "bias") and (r.root, r.module) in shrunk
        for r in last_rows
        if r.kind == "weight_grad" and r.bad
    )


def _output_gradient_amax(rows: Sequence[TensorRow]) -> Mapping[tuple[str, str], float]:
    """The amax of each module's output gradients, loss scale included, by root and module."""
    sizes: dict[tuple[str, str], float] = {}
    for r in rows:
        if r.kind == "grad_output":
            sizes[r.root, r.module] = max(sizes.get((r.root, r.module), 0.0), r.amax or 0.0)
    return sizes
