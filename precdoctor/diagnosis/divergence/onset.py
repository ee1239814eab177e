"""Where a run that ended in non-finite values left its course: the chain over steps that leads back to one root.

An op overflows because its operands are huge; they are huge because weights are; weights are because of an update. The
chain is followed backwards over the steps before the incident, in one measure of all of them: the update against the
weight it changes, the gradient norm and the loss, each against the calmest level the run had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from precdoctor.diagnosis.divergence.learning_rates import JUMP, jump_before, of_group, raised, raised_group
from precdoctor.diagnosis.divergence.missing_zero_grad import unzeroed
from precdoctor.diagnosis.divergence.updates_by_step import Updates, updates_before
from precdoctor.diagnosis.survey.histories import by_optimizer
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: RMS of an update over RMS of its weight from which the weight is replaced, not trained (as PD504's ``ratio``).
REPLACED = 0.3
#: ... and from which that is enough in itself, where no healthy step came before: nothing is left of the weight.
OUTWEIGHED = 1.0
#: Norms this many times the calmest level are out of line (as PD603's ``factor``); while above ``_RISING``, still so.
EXPLODED, _RISING = 30.0, 4.0
#: Steps from whose median a level is told, and the fewest of them.
_LEVEL, _FEWEST = 8, 4
#: Times its size before the root that a tensor has at the incident, for the incident to follow from it.
_GROWN = 8.0
#: A loss below zero by this many times its first magnitude, and at least ``_FAR``, has no bound (as PD603).
_UNBOUNDED, _FAR = 300.0, 100.0
#: Steps in a row whose gradients were kept (as PD603's ``kept_steps``).
_KEPT = 8


@dataclass(frozen=True)
class Link:
    """One link of the chain: at ``step``, ``what`` (words) had the value ``value``; usual before: ``usual``."""

    step: int
    what: str
    value: float
    usual: float | None = None

    @property
    def words(self) -> str:
        """``loss 3.05 -> 1.7e+07``."""
        before = f"{self.usual:.3g} -> " if self.usual is not None else ""
        return f"{self.what} {before}{self.value:.3g}"

    def as_evidence(self) -> dict[str, Any]:
        """For a finding."""
        return {"step": self.step, "what": self.what, "value": self.value, "usual": self.usual}


@dataclass(frozen=True)
class Divergence:
    """Attributes:
    root: the step whose update threw the run off.
    kind: learning-rate | rewritten | unzeroed | unbounded | multiplied | batch | gradient | updates | growth.
    steps: of the optimizer that did, up to the incident.
    at: index of ``root`` in ``steps``.
    links: the chain, first the root.
    ratio: RMS of the update over RMS of the weight it replaced most, at the root and behind it; None where unknown.
    usual_ratio: the same on the steps before.
    parameter: whose.
    """

    root: int
    kind: str
    process: Process
    steps: Sequence[StepFacts]
    at: int
    links: tuple[Link, ...]
    ratio: float | None = None
    usual_ratio: float | None = None
    parameter: str = ""

    @property
    def first(self) -> StepFacts:
        """The root's step."""
        return self.steps[self.at]


def divergence_before(view: RunView, process: Process, step: int) -> Divergence | None:
    """How the run had left its course before ``step``, at which it became non-finite; None where it had not."""
    memo = f"divergence-{process.rank}-{process.attempt}-{step}"
    return view.remember(memo, lambda: _divergence(view, process, step))


def _divergence(view: RunView, process: Process, step: int) -> Divergence | None:
    updates = updates_before(view, process, step)
    found = []
    for (own, _), steps in by_optimizer(view).items():
        before = [s for s in steps if s.step < step and not s.skipped]
        if own == process and before and (d := _of_optimizer(view, process, before, step, updates)) is not None:
            found.append(d)
    return min(found, key=lambda d: d.root, default=None)


def _of_optimizer(
    view: RunView, process: Process, steps: Sequence[StepFacts], incident: int, updates: Updates
) -> Divergence | None:
    at = _departure(steps, updates)
    jump = jump_before(steps, len(steps) if at is None else at + 1)
    falls = _falls_without_end(steps)
    at = next((i for i in (jump, falls, at) if i is not None), None)
    kept = _not_zeroed(view, process, steps, at)
    at = kept if kept is not None else at
    written = _rewritten(steps, at, incident, updates)
    if written is not None:
        at, jump, falls, kept = written, None, None, None
    elif jump is None and falls is None and kept is None and _multiplied(steps, updates) is not None:
        at = 0  # it has been so all along, and shows once the weights have grown
    if at is None:
        return None
    root = steps[at].step
    ratio, parameter = updates.largest(root, incident)
    if falls is None and (
        not _threw_weights(view, process, root, incident, ratio, updates) or _still_learning(steps, at)
    ):
        return None
    begins = at == 0 and all(i is None for i in (jump, falls, kept, written)) and _multiplied(steps, updates) is None
    if begins and (ratio or 0.0) < OUTWEIGHED:
        return None  # nothing healthy to compare with: small networks at brisk rates begin like this
    known = {"rewritten": written, "unzeroed": kept, "learning-rate": jump, "unbounded": falls}
    kind = next((name for name, i in known.items() if i is not None), "")
    kind = kind or _kind(view, process, steps, at, updates)
    links = _links(view, process, steps, at, kind, updates, incident)
    usual = _before([updates.ratio(s.step) for s in steps[:at]])
    return Divergence(root, kind, process, steps, at, links, ratio, usual, parameter)


# -- where it began ---------------------------------------------------------------------------------------------------


def departure(steps: Sequence[StepFacts]) -> int | None:
    """Index of the first step of those, up to the last one, on which loss or gradient norm is out of line.

    None where the last one is in line. Norms and losses before that index are those of a run on its course.
    """
    return _departure(steps, None)


def course_left(steps: Sequence[StepFacts], at: int) -> int:
    """Index of the step that threw the run off, where step ``at`` is seen to be out of line; ``at`` with no earlier."""
    jump, left = jump_before(steps, at + 1), departure(steps[: at + 1])
    return min(i for i in (jump, left, at) if i is not None)


def _departure(steps: Sequence[StepFacts], updates: Updates | None) -> int | None:
    norms = calm([s.grad_norm for s in steps])
    losses = calm([s.loss if s.loss is not None and s.loss > 0.0 else None for s in steps])
    begun = next((s.loss for s in steps if s.loss is not None), None)
    begun = begun if begun is not None and begun > 0.0 else None

    def out_of_line(i: int, times: float, undone: float) -> bool:
        s = steps[i]
        ratio = updates.ratio(s.step) if updates is not None else None
        if ratio is not None and ratio >= REPLACED:
            return True
        level = norms[i]
        if level is not None and s.grad_norm is not None and s.grad_norm > times * level:
            return True
        low = losses[i]
        return low is not None and begun is not None and s.loss is not None and s.loss > low + undone * max(begun, low)

    if not steps or not out_of_line(len(steps) - 1, EXPLODED, 2.0):
        return 0 if updates is not None and _never_begun(steps, updates) else None
    at = len(steps) - 1
    while at > 0 and out_of_line(at - 1, _RISING, 1.0):
        at -= 1
    return at


def _never_begun(steps: Sequence[StepFacts], updates: Updates) -> bool:
    """Whether the first update replaced a weight, and no loss since was below the first one."""
    losses = [s.loss for s in steps if s.loss is not None]
    first = updates.ratio(steps[0].step)
    return first is not None and first >= REPLACED and len(losses) > 1 and min(losses[1:]) > 1.25 * losses[0] > 0.0


def calm(values: Sequence[float | None]) -> list[float | None]:
    """Per entry the calmest level before it: the smallest median of eight; None before there are four values."""
    levels: list[float | None] = []
    known: list[float] = []
    lowest: float | None = None
    for value in values:
        if len(known) >= _FEWEST:
            level = median(known[-_LEVEL:])
            lowest = level if lowest is None else min(lowest, level)
        levels.append(lowest if lowest is None or lowest > 0.0 else None)
        if value is not None:
            known.append(value)
    return levels


def healthy_norms(steps: Sequence[StepFacts]) -> list[float]:
    """Gradient norms of the steps before the run left its course; of all, where the last one is still on it."""
    at = departure(steps)
    return [s.grad_norm for s in steps[:at] if s.grad_norm is not None]


def clip_level(norms: Sequence[float]) -> float:
    """Twice the median of norms of a run on its course; 1, to which most recipes clip, with fewer than four."""
    return 2.0 * median(norms[-32:]) if len(norms) >= _FEWEST and median(norms[-32:]) > 0.0 else 1.0


def _rewritten(steps: Sequence[StepFacts], at: int | None, incident: int, updates: Updates) -> int | None:
    """Index of the step after which something that is no update made a matrix far larger, up to where it departs."""
    found = updates.rewritten(steps[0].step, incident, JUMP)
    if found is None:
        return None
    index = next((i for i, s in enumerate(steps) if s.step == found[0]), None)
    return index if index is not None and (at is None or index <= at) else None


# -- whether the incident follows from it -----------------------------------------------------------------------------


def _threw_weights(
    view: RunView, process: Process, root: int, incident: int, ratio: float | None, updates: Updates
) -> bool:
    """Whether weights were replaced since, and what the incident's step computes with is large for that."""
    replaced = (ratio is not None and ratio >= REPLACED) or updates.grown(root, incident) >= _GROWN / 2.0
    if not replaced and updates.seen(root, incident):
        return False
    rows = [r for r in view.rows(process, incident) if r.kind in ("weight", *FORWARD_KINDS) and r.kind != "batch"]
    sampled = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step <= root]
    usual: dict[Any, list[float]] = {}
    for step in sampled[-_LEVEL:]:
        for r in view.rows(process, step):
            if r.amax:
                usual.setdefault(r.key, []).append(r.amax)
    grown = [r.amax / median(usual[r.key]) for r in rows if r.amax and r.key in usual]
    return replaced if not grown else max(grown) >= _GROWN


def _still_learning(steps: Sequence[StepFacts], at: int) -> bool:
    """Whether the loss of the last step is below the one at the root: large updates that do no harm."""
    losses = [s.loss for s in steps[at:] if s.loss is not None]
    return len(losses) >= _LEVEL and losses[-1] < losses[0] and steps[-1].loss is not None


def _falls_without_end(steps: Sequence[StepFacts]) -> int | None:
    """Index at which a loss is far below zero that goes on falling: the optimizer does what it is asked for."""
    losses = [s.loss for s in steps]
    known = [loss for loss in losses if loss is not None]
    if not known or known[-1] > min(known):
        return None
    far = -max(_UNBOUNDED * abs(known[0]), _FAR)
    if max(known) > -far or known[-1] > far:
        return None
    return next(i for i, loss in enumerate(losses) if loss is not None and loss <= far)


def _not_zeroed(view: RunView, process: Process, steps: Sequence[StepFacts], at: int | None) -> int | None:
    """Index of the first step whose gradients nobody zeroed, where the run left its course behind it."""
    kept = unzeroed(view, _KEPT)
    if kept is None or at is None or kept.process != process or kept.optimizer != steps[0].optimizer:
        return None
    if not kept.since <= steps[at].step <= kept.last and steps[at].step:
        return None
    return next((i for i, s in enumerate(steps) if s.step >= kept.since), None)


# -- what it was ------------------------------------------------------------------------------------------------------


def _kind(view: RunView, process: Process, steps: Sequence[StepFacts], at: int, updates: Updates) -> str:
    root = steps[at]
    if raised(steps, at) is not None:
        return "learning-rate"
    if _multiplied(steps[at:], updates) is not None:
        return "multiplied"
    if extreme_batch(view, process, steps, at) is not None:
        return "batch"
    level = calm([s.grad_norm for s in steps])[at]
    if level is not None and root.grad_norm is not None and root.grad_norm >= EXPLODED * level:
        return "gradient"
    ratio = updates.ratio(root.step)
    return "updates" if ratio is not None and ratio >= REPLACED else "growth"


def _multiplied(steps: Sequence[StepFacts], updates: Updates) -> float | None:
    """What every weight matrix is multiplied by per step, where that is one number for all: no gradient does that.

    Where the script multiplies, gradients join in as the weights grow: their steps are left out in a second attempt.
    """
    for chosen in (steps, [s for s in steps if (updates.ratio(s.step) or 0.0) < REPLACED / 3.0]):
        factors = sorted(f for s in chosen for f in updates.factors(s.step))
        if len(factors) >= 2 * _FEWEST:
            low, high = factors[len(factors) // 10], factors[-1 - len(factors) // 10]
            if low > 1.05 and (high - 1.0) < 1.2 * (low - 1.0):
                return median(factors)
    return None


def extreme_batch(
    view: RunView, process: Process, steps: Sequence[StepFacts], at: int
) -> tuple[int, float, float] | None:
    """Step, amax and largest amax before it of a batch that is ``_GROWN`` times all before, at the root."""
    sampled = [s.step for s in steps[:at] if s.sampled]
    if len(sampled) < _FEWEST or not steps[at].sampled:
        return None
    before: dict[Any, float] = {}
    for step in sampled[-32:]:
        for r in view.rows(process, step):
            if r.kind == "batch" and r.amax:
                before[r.key] = max(before.get(r.key, 0.0), r.amax)
    here = [r for r in view.rows(process, steps[at].step) if r.kind == "batch" and r.amax and r.key in before]
    worst = max(here, key=lambda r: (r.amax or 0.0) / before[r.key], default=None)
    if worst is None or not worst.amax or worst.amax < _GROWN * before[worst.key]:
        return None
    return steps[at].step, worst.amax, before[worst.key]


def _links(
    view: RunView,
    process: Process,
    steps: Sequence[StepFacts],
    at: int,
    kind: str,
    updates: Updates,
    incident: int,
) -> tuple[Link, ...]:
    """The root, and the first sight of what followed, in order of time."""
    links = []
    root = steps[at]
    if kind == "learning-rate" and (rates := raised(steps, at)) is not None:
        group = raised_group(steps, at)
        links.append(Link(root.step, f"learning rate{of_group(group)}", rates[1], rates[0]))
    if kind == "rewritten" and (written := updates.rewritten(root.step, incident, JUMP)) is not None:
        links.append(Link(root.step, f"`{written[1]}` against weight plus update, after the step", written[2], 1.0))
    if kind == "batch" and (batch := extreme_batch(view, process, steps, at)) is not None:
        links.append(Link(batch[0], "largest value of the batch", batch[1], batch[2]))
    if kind == "multiplied" and (factor := _multiplied(steps[at:], updates)) is not None:
        links.append(Link(root.step, "growth of every weight matrix per step", factor, 1.0))
    later = steps[at:]
    norms, losses = ([s.grad_norm for s in steps], [s.loss for s in steps])
    if at == 0:
        links += [Link(root.step, "loss", root.loss)] if root.loss is not None else []
        links += [Link(root.step, "gradient norm", root.grad_norm)] if root.grad_norm is not None else []
    links += _rise(later, "gradient norm", norms[at:], _before(norms[:at]))
    first = next((s for s in later if (updates.ratio(s.step) or 0.0) >= REPLACED), None)
    if first is not None:
        ratio, parameter = updates.largest(first.step, first.step + 1)
        usual = [r for s in steps[:at] if (r := updates.ratio(s.step)) is not None]
        links.append(Link(first.step, f"update / weight of `{parameter}`", ratio or 0.0, _before(usual)))
    links += _rise(later, "loss", losses[at:], _before(losses[:at]))
    return tuple(sorted(links, key=lambda link: link.step))


def _before(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known[-_LEVEL:]) if known else None


def _rise(steps: Sequence[StepFacts], what: str, values: Sequence[float | None], usual: float | None) -> list[Link]:
    """Where a series is highest, if that is above its usual value or, without one, above its first."""
    known = [(v, s.step) for v, s in zip(values, steps, strict=True) if v is not None]
    if not known:
        return []
    base = usual if usual is not None else known[0][0]
    peak, step = max(known, key=lambda k: abs(k[0]))
    return [Link(step, what, peak, base)] if abs(peak) > 2.0 * abs(base) else []
