"""Finds the step at which training diverged: the chain from an incident back to one root.

Compares updates with their weights, and gradient norm and loss with their calmest level before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.divergence.learning_rates import jump_before, rise_at
from precdoctor.diagnosis.divergence.missing_zero_grad import unzeroed
from precdoctor.diagnosis.divergence.updates_by_step import Updates, updates_before
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, grouped
from precdoctor.diagnosis.survey.step_facts import StepFacts, losses_of, norms_of
from precdoctor.diagnosis.survey.view import Process, RunView, remembered

#: RMS of an update over RMS of its weight from which the weight is replaced, not trained: the ``ratio`` of PD504.
REPLACED = 0.3
#: The same ratio from which the first step can be the root, with no healthy step before: nothing is left of the weight.
OUTWEIGHED = 1.0
#: Times its calmest level from which a gradient norm is out of line (the ``factor`` of PD603); the same just before it.
EXPLODED, _RISING = 30.0, 4.0
#: Number of values whose median is a level, and the fewest; eight average the noise of batches.
_LEVEL, _FEWEST = 8, 4
#: Number of steps that give the usual gradient norm or the range of a batch; older ones belong to another phase.
_HISTORY = 32
#: Times its usual amax before the root from which a tensor of the incident, or a batch, is large: three binades.
_GROWN = 8.0
#: Times the amax of the batch, or times 1 if that is more, from which an output is out of all proportion: 20 binades.
_OUTSIZED = 2.0**20
#: A falling loss has no bound once it is below minus this many times the first loss and minus this value: as in PD603.
_UNBOUNDED, _FAR = 300.0, 100.0
#: Fewest steps in a row without ``zero_grad()``: the ``kept_steps`` of PD603.
_KEPT = 8


@dataclass(frozen=True)
class Link:
    """One link of the chain: at ``step`` the quantity ``what`` had ``value``; ``usual`` is its level before."""

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
        return {"step": self.step, "what": self.what, "value": self.value, "usual": self.usual}


@dataclass(frozen=True)
class Divergence:
    """How training diverged before an incident.

    Attributes:
        root: the step whose update is the first of the chain.
        kind: of the root, one of those in the package's docstring.
        steps: the optimizer's steps before the incident that were not skipped.
        at: index of ``root`` in ``steps``.
        links: the chain, in order of step.
        ratio: largest RMS of an update over RMS of its weight at the root or the next step; None if unknown.
        usual_ratio: median of the largest ratio on the steps before; None if unknown.
        parameter: the parameter with ``ratio``; empty if unknown.
        own_ratio: largest ratio at the root itself; None if unknown.
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
    own_ratio: float | None = None

    @property
    def first(self) -> StepFacts:
        """The facts of the root's step."""
        return self.steps[self.at]


@remembered
def divergence_before(view: RunView, process: Process, step: int) -> Divergence | None:
    """Return how training had diverged before the incident at ``step``; None if it had not."""
    return _divergence(view, process, step) or _stage_divergence(view, process, step)


def _stage_divergence(view: RunView, process: Process, step: int) -> Divergence | None:
    """Return how another pipeline stage had diverged, whose results this one read; one rank per stage is searched."""
    mine = _stages(view, process)
    others = {s: p for p in reversed(view.processes) if p.attempt == process.attempt and (s := _stages(view, p))}
    found = [_divergence(view, p, step) for s, p in sorted(others.items()) if mine and s != mine]
    return min((d for d in found if d is not None), key=lambda d: d.root, default=None)


def _stages(view: RunView, process: Process) -> tuple[int, ...]:
    return tuple((view.facts(process).get("layout") or {}).get("stages") or ())


def _divergence(view: RunView, process: Process, step: int) -> Divergence | None:
    """Return the divergence of this process with the earliest root, over all its optimizers; None without one."""
    updates = updates_before(view, process, step)
    found = []
    for (own, _), steps in by_optimizer(view).items():
        before = [s for s in steps if s.step < step and not s.skipped]
        if own == process and before and (d := _optimizer_divergence(view, process, before, step, updates)) is not None:
            found.append(d)
    return min(found, key=lambda d: d.root, default=None)


def _optimizer_divergence(
    view: RunView, process: Process, steps: Sequence[StepFacts], incident: int, updates: Updates
) -> Divergence | None:
    departed, falls = departure(steps, updates), _unbounded_from(steps)
    jump = jump_before(steps, len(steps) if departed is None else departed + 1)
    at = next((i for i in (jump, falls, departed) if i is not None), None)
    summing = _unzeroed_from(view, process, steps, at)
    rewritten = _rewritten_at(steps, at if summing is None else summing, incident, updates)
    known = {"rewritten": rewritten, "unzeroed": summing, "learning-rate": jump, "unbounded": falls}
    kind, at = next(((name, i) for name, i in known.items() if i is not None), ("", departed))
    factor = None if kind else _common_factor(steps, updates)
    if factor is not None:
        at = 0  # true from the start, visible once the weights have grown
    if at is None:
        return None
    root = steps[at].step
    ratio, parameter = updates.largest(root, incident)
    if (falls is None or rewritten is not None) and (
        not _weights_replaced(view, process, root, incident, ratio, updates) or _still_learning(steps, at)
    ):
        return None
    begins = at == 0 and not kind and factor is None
    if begins and (ratio or 0.0) < OUTWEIGHED:
        return None  # no healthy step to compare with: small networks at brisk rates begin like this
    large = _large_from_the_start(view, process, root) if begins else None
    kind = kind or ("initial" if large is not None else _kind(view, process, steps, at, updates))
    links = (*([large] if large is not None else []), *_links(view, process, steps, at, kind, updates, incident))
    usual = _usual_level([updates.ratio(s.step) for s in steps[:at]])
    return Divergence(root, kind, process, steps, at, links, ratio, usual, parameter, updates.ratio(root))


# -- the first step out of line ---------------------------------------------------------------------------------------


def departure(steps: Sequence[StepFacts], updates: Updates | None = None) -> int | None:
    """Return the index from which on loss or gradient norm are out of line; None unless the last step is.

    Norms and losses before the index are healthy. With ``updates`` replaced weights also count, even by the first
    update alone.
    """
    norms = calm([s.grad_norm for s in steps])
    losses = calm([s.loss if s.loss is not None and s.loss > 0.0 else None for s in steps])
    first = next((s.loss for s in steps if s.loss is not None), None)
    first = first if first is not None and first > 0.0 else None

    def out_of_line(i: int, times: float, undone: float) -> bool:
        s = steps[i]
        ratio = updates.ratio(s.step) if updates is not None else None
        if ratio is not None and ratio >= REPLACED:
            return True
        level = norms[i]
        if level is not None and s.grad_norm is not None and s.grad_norm > times * level:
            return True
        low = losses[i]
        return low is not None and first is not None and s.loss is not None and s.loss > low + undone * max(first, low)

    if not steps or not out_of_line(len(steps) - 1, EXPLODED, 2.0):
        return 0 if updates is not None and _ruined_by_first_update(steps, updates) else None
    at = len(steps) - 1
    while at > 0 and out_of_line(at - 1, _RISING, 1.0):
        at -= 1
    return at


def course_left(steps: Sequence[StepFacts], at: int) -> int:
    """Return the index at which training diverged, given that ``steps[at]`` is out of line; at most ``at``."""
    jump, left = jump_before(steps, at + 1), departure(steps[: at + 1])
    return min(i for i in (jump, left, at) if i is not None)


def _ruined_by_first_update(steps: Sequence[StepFacts], updates: Updates) -> bool:
    """Return whether the first update replaced a weight, and all later losses are at least 1.25 times the first."""
    losses = losses_of(steps)
    first = updates.ratio(steps[0].step)
    return first is not None and first >= REPLACED and len(losses) > 1 and min(losses[1:]) > 1.25 * losses[0] > 0.0


def calm(values: Sequence[float | None]) -> list[float | None]:
    """Return the calmest level before each entry, the smallest median of 4 to 8 values; None if unknown or not > 0."""
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
    """Return the gradient norms of the steps before training diverged; of all steps if it has not."""
    at = departure(steps)
    return norms_of(steps[:at])


def clip_level(norms: Sequence[float]) -> float:
    """Return the norm to clip at: twice the median of healthy norms; 1 for fewer than four, as in most recipes."""
    return 2.0 * median(norms[-_HISTORY:]) if len(norms) >= _FEWEST and median(norms[-_HISTORY:]) > 0.0 else 1.0


def _rewritten_at(steps: Sequence[StepFacts], at: int | None, incident: int, updates: Updates) -> int | None:
    """Return the index, at most ``at``, of a step after which something other than its update enlarged a matrix."""
    found = updates.rewritten(steps[0].step, incident)
    if found is None:
        return None
    index = next((i for i, s in enumerate(steps) if s.step == found[0]), None)
    return index if index is not None and (at is None or index <= at) else None


def _large_from_the_start(view: RunView, process: Process, step: int) -> Link | None:
    """Return a link with the largest output before any update, if it is out of all proportion to the batch."""
    rows = [r for r in view.rows(process, step) if r.phase == "train" and r.amax is not None]
    batch = max((r.amax for r in rows if r.kind == "batch" and r.amax is not None), default=1.0)
    made = max((r for r in rows if r.kind == "output"), key=lambda r: r.amax or 0.0, default=None)
    if made is None or made.amax is None or made.amax < _OUTSIZED * max(batch, 1.0):
        return None
    return Link(step, f"largest output of `{made.module or made.root}`", made.amax, batch)


# -- whether the incident follows from the root -----------------------------------------------------------------------


def _weights_replaced(
    view: RunView, process: Process, root: int, incident: int, ratio: float | None, updates: Updates
) -> bool:
    """Return whether weights were replaced or grew since the root, and tensors of the incident are much larger now.

    If no update was recorded, the tensors alone decide; if no tensor can be compared, replaced or grown weights do.
    """
    replaced = (ratio is not None and ratio >= REPLACED) or updates.grown(root, incident) >= _GROWN / 2.0
    if not replaced and updates.seen(root, incident):
        return False
    rows = [r for r in view.rows(process, incident) if r.kind in ("weight", *FORWARD_KINDS) and r.kind != "batch"]
    sampled = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step <= root]
    usual = grouped((r.key, r.amax) for step in sampled[-_LEVEL:] for r in view.rows(process, step) if r.amax)
    grown = [r.amax / median(usual[r.key]) for r in rows if r.amax and r.key in usual]
    return replaced if not grown else max(grown) >= _GROWN


def _still_learning(steps: Sequence[StepFacts], at: int) -> bool:
    """Return whether the last loss is below that of the root, so that the large updates do no harm."""
    losses = losses_of(steps[at:])
    return len(losses) >= _LEVEL and losses[-1] < losses[0] and steps[-1].loss is not None


def _unbounded_from(steps: Sequence[StepFacts]) -> int | None:
    """Return the index from which a falling loss is far below zero, so that the objective has no bound; else None."""
    losses = [s.loss for s in steps]
    known = [loss for loss in losses if loss is not None]
    if not known or known[-1] > min(known):
        return None
    far = -max(_UNBOUNDED * abs(known[0]), _FAR)
    if max(known) > -far or known[-1] > far:
        return None
    return next(i for i, loss in enumerate(losses) if loss is not None and loss <= far)


def _unzeroed_from(view: RunView, process: Process, steps: Sequence[StepFacts], at: int | None) -> int | None:
    """Return the index of the first step without ``zero_grad()``; None unless ``at`` is among those steps."""
    found = unzeroed(view, _KEPT)
    if found is None or at is None or found.process != process or found.optimizer != steps[0].optimizer:
        return None
    if not found.since <= steps[at].step <= found.last and steps[at].step:
        return None
    return next((i for i, s in enumerate(steps) if s.step >= found.since), None)


# -- kind and links of a divergence -----------------------------------------------------------------------------------


def _kind(view: RunView, process: Process, steps: Sequence[StepFacts], at: int, updates: Updates) -> str:
    """Return the kind of a root for which no other evidence was found, from the root's own step."""
    root = steps[at]
    if rise_at(steps, at) is not None:
        return "learning-rate"
    if _common_factor(steps[at:], updates) is not None:
        return "multiplied"
    if extreme_batch(view, process, steps, at) is not None:
        return "batch"
    level = calm([s.grad_norm for s in steps])[at]
    if level is not None and root.grad_norm is not None and root.grad_norm >= EXPLODED * level:
        return "gradient"
    ratio = updates.ratio(root.step)
    return "updates" if ratio is not None and ratio >= REPLACED else "growth"


def _common_factor(steps: Sequence[StepFacts], updates: Updates) -> float | None:
    """Return the factor by which every weight matrix grows per step, if it is the same for all; else None.

    Gradients cannot cause that. Large updates of grown weights disturb the factor: steps without them are also tried.
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
    """Return step, amax and largest earlier amax of a batch that is ``_GROWN`` times larger at ``at``, else None."""
    sampled = [s.step for s in steps[:at] if s.sampled]
    if len(sampled) < _FEWEST or not steps[at].sampled:
        return None
    before: dict[Any, float] = {}
    for step in sampled[-_HISTORY:]:
        for r in view.rows(process, step):
            if r.kind == "batch" and r.amax:
                before[r.key] = max(before.get(r.key, 0.0), r.amax)
    here = [r for r in view.rows(process, steps[at].step) if r.kind == "batch" and r.amax and r.key in before]
    worst = max(here, key=lambda r: (r.amax or 0.0) / before[r.key], default=None)
    if worst is None or not worst.amax or worst.amax < _GROWN * before[worst.key]:
        return None
    return steps[at].step, worst.amax, before[worst.key]


def _links(
    view: RunView, process: Process, steps: Sequence[StepFacts], at: int, kind: str, updates: Updates, incident: int
) -> tuple[Link, ...]:
    """Return the root, and the peaks of norm, update and loss after it, in order of step."""
    links = []
    root = steps[at]
    if kind == "learning-rate" and (rise := rise_at(steps, at)) is not None:
        links.append(Link(root.step, rise.what, rise.to, rise.before))
    if kind == "rewritten" and (written := updates.rewritten(root.step, incident)) is not None:
        links.append(Link(root.step, f"`{written[1]}` against weight plus update, after the step", written[2], 1.0))
    if kind == "batch" and (batch := extreme_batch(view, process, steps, at)) is not None:
        links.append(Link(batch[0], "largest value of the batch", batch[1], batch[2]))
    if kind == "multiplied" and (factor := _common_factor(steps[at:], updates)) is not None:
        links.append(Link(root.step, "growth of every weight matrix per step", factor, 1.0))
    later, norms, losses = steps[at:], [s.grad_norm for s in steps], [s.loss for s in steps]
    if at == 0:
        links += [Link(root.step, "loss", root.loss)] if root.loss is not None else []
        links += [Link(root.step, "gradient norm", root.grad_norm)] if root.grad_norm is not None else []
    links += _rise(later, "gradient norm", norms[at:], _usual_level(norms[:at]))
    first = next((s for s in later if (updates.ratio(s.step) or 0.0) >= REPLACED), None)
    if first is not None:
        ratio, parameter = updates.largest(first.step, first.step + 1)
        usual = _usual_level([updates.ratio(s.step) for s in steps[:at]])
        links.append(
            Link(first.step, f"update / weight of `{parameter}`{updates.bound_words(first.step)}", ratio or 0.0, usual)
        )
    links += _rise(later, "loss", losses[at:], _usual_level(losses[:at]))
    return tuple(sorted(links, key=lambda link: link.step))


def _usual_level(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known[-_LEVEL:]) if known else None


def _rise(steps: Sequence[StepFacts], what: str, values: Sequence[float | None], usual: float | None) -> list[Link]:
    """Return the peak of a series as a link, if it is more than twice the usual (or else the first) value."""
    known = [(v, s.step) for v, s in zip(values, steps, strict=True) if v is not None]
    if not known:
        return []
    base = usual if usual is not None else known[0][0]
    peak, step = max(known, key=lambda k: abs(k[0]))
    return [Link(step, what, peak, base)] if abs(peak) > 2.0 * abs(base) else []
