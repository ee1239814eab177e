"""PD504, smaller updates: a lower learning rate, a warm-up, or a longer warm-up if there is one already."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from precdoctor.diagnosis.advice.stable_rate import StableRate, rounded_down, stable_rate
from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import Parameter, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Least number of steps of a proposed warm-up, as in torch's examples and most recipes.
_WARM_UP = 1000
#: Shares of the peak rate: a rate that begins below the first is warmed up, one above the second is at its peak (rates
#: of a schedule are rounded).
_BELOW, _AT_PEAK = 0.5, 0.999
#: Least number of losses in a quarter of a run, and the factor over the first loss that the noise of batches does not
#: reach. Chosen empirically.
_QUARTER, _ABOVE = 8, 1.1


@dataclass(frozen=True)
class Rates:
    """Learning rates of one optimizer of a process, or of one of its parameter groups.

    Attributes:
        measured: on the examined step.
        first: on the first step.
        peak: the largest of the run.
        last: on the last step.
        warm_up: steps of the rise to the peak; 0 if the rate begins at half of the peak or above, or falls in between.
        optimizer: name of the optimizer.
        group: number of the parameter group whose rates these are; None if the optimizer has one, or it is not known.
        others: rates of the optimizer's other groups on the examined step.
    """

    measured: float
    first: float
    peak: float
    last: float
    warm_up: int
    optimizer: str
    group: int | None
    others: tuple[float, ...]

    @property
    def group_words(self) -> str:
        """``, in parameter group 1 of AdamW#0 (other groups: 0.001)``; empty without a group."""
        if self.group is None:
            return ""
        others = ", ".join(f"{r:.3g}" for r in dict.fromkeys(self.others))
        return f", in parameter group {self.group} of {self.optimizer} (learning rate of the others: {others})"

    @property
    def words(self) -> str:
        """``, at a learning rate of 0.1; there is a warm-up of 5 steps from 1e-06 to 0.1``."""
        if not self.warm_up:
            return f", at a learning rate of {self.measured:.3g}"
        warmed = f"a warm-up of {plural(self.warm_up, 'step')} from {self.first:.3g} to {self.peak:.3g}"
        return f", at a learning rate of {self.measured:.3g}; there is {warmed}"


def rates_of(view: RunView, process: Process, step: int, weights: Container[Parameter]) -> Rates | None:
    """Return the rates of the optimizer that makes ``step``, or of its group that holds all ``weights``.

    None if no rate above 0 was recorded.
    """
    steps = view.timeline.get(process, ())
    name = next((s.optimizer for s in steps if s.step == step), "")
    group = _shared_group(view, process, name, weights)
    by_step = _rates_by_step((s for s in steps if s.optimizer == name), group)
    peak = max((rate for _, rate in by_step), default=0.0)
    if not peak:
        return None
    at = next(i for i, (_, rate) in enumerate(by_step) if rate >= _AT_PEAK * peak)
    rising = all(a <= b for (_, a), (_, b) in pairwise(by_step[: at + 1]))
    warm_up = by_step[at][0] - by_step[0][0] if rising and by_step[0][1] < _BELOW * peak else 0
    measured = next((rate for s, rate in by_step if s == step and rate), peak)
    lrs = next((s.lrs for s in steps if s.optimizer == name and s.step == step), ())
    others = tuple(rate for i, rate in enumerate(lrs) if i != group and math.isfinite(rate))
    return Rates(measured, by_step[0][1], peak, by_step[-1][1], warm_up, name, group, others)


def _shared_group(view: RunView, process: Process, optimizer: str, weights: Container[Parameter]) -> int | None:
    """Return the number of the optimizer's group that holds all ``weights``; None if it has no other with known rate.

    Which group holds a weight is known from ``rank.json``, and the rate of each group from every step.
    """
    optimizers = view.facts(process).get("optimizers") or ()
    held = {tuple(p.get("group") or ()) for place, p in recorded_parameters(view, process) if place in weights}
    if len(held) != 1 or len(own := held.pop()) != 2 or not 0 <= own[0] < len(optimizers):
        return None
    counts = {len(s.lrs) for s in view.timeline.get(process, ()) if s.optimizer == optimizer}
    known = text(optimizers[own[0]].get("name")) == optimizer and len(counts) == 1 and 0 <= own[1] < max(counts)
    return int(own[1]) if known and max(counts) > 1 else None


def warmed_up(view: RunView) -> int:
    """Return the first step by which each optimizer with a warm-up reached half of its largest rate; 0 without."""
    reached = 0
    for steps in by_optimizer(view).values():
        by_step = _rates_by_step(steps)
        half_peak = 0.5 * max((rate for _, rate in by_step), default=0.0)
        if by_step and by_step[0][1] < half_peak:
            reached = max(reached, next(step for step, rate in by_step if rate >= half_peak))
    return reached


def _rates_by_step(steps: Iterable[StepFacts], group: int | None = None) -> list[tuple[int, float]]:
    """Return step and learning rate, of one parameter group if it is known, of the steps with a finite rate."""
    rates = ((s.step, s.lr if group is None else s.lrs[group]) for s in steps)
    return [(step, rate) for step, rate in rates if rate is not None and math.isfinite(rate)]


def lower_rate(view: RunView, rates: Rates | None, ratio: float, target: float, what: str) -> Prescription:
    """Prescribe the rate that takes updates from ``ratio`` to ``target`` times the weight; ``what`` names the ratio."""
    factor = rounded_down(target / ratio)
    groups = sum(len(o.get("groups") or ()) for o in view.optimizers)
    varies = rates is not None and min(rates.first, rates.last) < _AT_PEAK * rates.peak
    group = rates.group if rates is not None else None
    shown, whose = "", f" of parameter group {group}" if group is not None else ""
    if rates is not None and (groups == 1 or rates.group is not None):
        shown = f" ({'peak ' if varies else ''}{rates.peak:.3g} -> {rates.peak * factor:.3g})"
    return Prescription(
        title=f"learning rate{whose} x {factor:g}{shown}: {what} {ratio:.2g} -> {ratio * factor:.1g}",
        change={"lr_factor": factor} | ({"parameter_group": group} if group is not None else {}),
        predicted={"update_to_weight": {"from": ratio, "to": ratio * factor}},
        snippet=snippets.lower_rate(factor, group),
    )


def gentler_start(rates: Rates | None, ratio: float, target: float) -> Prescription:
    """Prescribe a warm-up that begins with small enough updates; a longer one if the run has a warm-up."""
    factor, steps = rounded_down(target / ratio), _WARM_UP
    if rates is not None and rates.warm_up:
        steps = max(_WARM_UP, math.ceil(rates.warm_up / factor))
        start, after = float(f"{max(rates.first / rates.peak, 1e-6):.3g}"), ratio * rates.warm_up / steps
        title, beside = f"warm up over {plural(steps, 'step')}, not {rates.warm_up:,}", "in place of the warm-up"
        change: dict[str, float] = {"warm_up_steps": steps}
    else:
        start, after = factor, ratio * factor
        begin = f"of {rates.measured * factor:.2g}" if rates is not None else f"x {factor:g}"
        title, beside = f"warm up from a learning rate {begin}", "beside the schedule"
        change = {"lr_factor": factor, "warm_up_steps": steps}
    return Prescription(
        title=f"{title}: first updates / weight {ratio:.2g} -> {after:.1g}",
        change=change,
        predicted={"update_to_weight": {"from": ratio, "to": after}},
        snippet=(
            "import torch\n\n"
            "warm_up = torch.optim.lr_scheduler.LinearLR(\n"
            f"    optimizer, start_factor={start!r}, total_iters={steps}\n"
            f")  # {beside} there is\n"
        ),
    )


def start_words(view: RunView, steps: Sequence[int], behind: str) -> tuple[str, str]:
    """Return which ``steps`` were measured, for a title and for a message: the first ones, or their numbers.

    ``behind``: `` at the full rate`` if the first steps after a warm-up are meant, else empty.
    """
    first, last, one = min(steps), max(steps), len(steps) == 1
    if not behind and first > view.steps["step"].min():  # the update of the first step was not recorded, or skipped
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return which, which
    title = f"the first {'step' if one else 'steps'}{behind}"
    return title, title if one else f"the first {plural(len(steps), 'step')}{behind}"


def stable_rate_of(view: RunView, process: Process) -> StableRate | None:
    """Return the largest stable rate of the process's first optimizer whose healthy steps show one; None without."""
    mine = (steps for (own, _), steps in by_optimizer(view).items() if own == process)
    found = (stable_rate(view, [s for s in steps if is_well(view, process, s) and not s.skipped]) for steps in mine)
    return next((rate for rate in found if rate is not None), None)


def losses_of(view: RunView, process: Process, steps: Iterable[StepFacts]) -> list[float]:
    """Return the losses of the healthy ones among these steps of a process."""
    return [s.loss for s in steps if s.loss is not None and is_well(view, process, s)]


def never_was_below(view: RunView) -> bool:
    """Return whether the median of a positive loss stayed well above its first value in every quarter of the run."""
    for (process, _), steps in by_optimizer(view).items():
        losses = losses_of(view, process, steps)
        quarter = len(losses) // 4
        parts = [losses[i * quarter : (i + 1) * quarter] for i in range(4)]
        if quarter >= _QUARTER and min(losses) > 0.0 and min(map(median, parts)) > _ABOVE * losses[0]:
            return True
    return False


def never_came_back(view: RunView, process: Process) -> bool:
    """Return whether the run ended non-finite, or above twice its first loss."""
    steps = [s for s in view.timeline.get(process, ()) if s.complete]
    if not steps or not is_well(view, process, steps[-1]):
        return bool(steps)
    losses = losses_of(view, process, steps)
    return bool(losses) and median(losses[-8:]) > 2.0 * losses[0] > 0.0


def came_back(losses: Sequence[float], count: int, learnt: float) -> bool:
    """Return whether a loss that more than doubled in ``count`` steps did the run no harm.

    It came back below its first value within three times as many steps, and is the share ``learnt`` below that in the
    newer half.
    """
    behind = losses[2 * count + 1 : 3 * count + 1]
    return len(behind) == count and median(behind) < losses[0] and left_of(losses) <= 1.0 - learnt


def left_of(losses: Sequence[float]) -> float:
    """Return the share of the first loss that is left in the newer half."""
    return median(losses[len(losses) // 2 :]) / losses[0]


def nothing_learnt(view: RunView, count: int, learnt: float) -> bool:
    """Whether a positive loss did not fall by the share ``learnt`` in a half of the run, of ``count`` steps or more."""
    for (process, _), steps in by_optimizer(view).items():
        losses = losses_of(view, process, steps)
        halves = losses[len(losses) // 8 : len(losses) // 2], losses[len(losses) // 2 :]
        if not losses or min(losses) <= 0.0:
            continue
        first_loss = min(losses[0], median(losses[:count]))  # the first updates may have made it worse
        if any(len(half) >= count and median(half) > (1.0 - learnt) * first_loss for half in halves):
            return True
    return False
