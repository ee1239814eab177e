"""PD603, detection: a gradient norm that rose and stayed up, by a jump or over the whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.analyses.histories import after_an_ordinary_update
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.divergence.onset import course_left
from precdoctor.diagnosis.survey.step_facts import StepFacts, losses_of
from precdoctor.diagnosis.survey.view import Process

#: Steps before a jump that make its baseline, and steps after it that show whether it stays. Chosen empirically.
WINDOW, AFTER = 32, 5
#: How many of the ``AFTER`` steps must stay up, and least number of steps behind a fatal one: a single step may be due
#: to its batch.
_STAY = 3
#: An explosion has passed if less than this share of the rise is left: a quarter. Chosen empirically.
_GONE = 0.25
#: An explosion has not passed if the loss stays above this many times the best loss before it. Chosen empirically.
_BACK = 2.0
#: An explosion is sudden if this share of the loss's rise happens in its first step: half. Chosen empirically.
_AT_ONCE = 0.5
#: Least progress of a loss, as a share of it, that a jump can undo. Chosen empirically.
_PROGRESS = 0.1
#: A learning rate that has risen by this factor counts as raised. Chosen empirically.
_RAISED = 2.0


@dataclass(frozen=True)
class Explosion:
    """The first jump of a gradient norm that stays, or the rise of a whole run.

    Attributes:
        at: index into ``steps`` of the first step with an exploded norm.
        baseline, peak: gradient norm before, and largest norm.
        loss: loss before and after, if known.
        diverged: no jump; the whole run rose.
        unbounded: diverged, with a loss that falls without end.
        fatal: one step, and almost no gradient after it.
    """

    process: Process
    steps: Sequence[StepFacts]
    at: int
    baseline: float
    peak: float
    loss: tuple[float, float] | None
    diverged: bool = False
    unbounded: bool = False
    fatal: bool = False

    @property
    def first(self) -> StepFacts:
        return self.steps[self.at]

    @property
    def left(self) -> int:
        """Index of the step at which training went wrong: ``at`` or one before it."""
        return course_left(self.steps, self.at)

    @property
    def sudden(self) -> bool:
        """Whether loss and norm jumped in one step that the update before it cannot have caused."""
        if self.loss is None or self.first.loss is None or self.diverged or self.fatal:
            return False
        at_once = self.first.loss - self.loss[0] >= _AT_ONCE * (self.loss[1] - self.loss[0])
        return at_once and after_an_ordinary_update(self.steps, self.at)

    @property
    def passed(self) -> bool:
        """Whether the run recovered by itself: at its end most of the rise of norm and loss is gone."""
        tail = self.steps[self.at :][-max(AFTER, (len(self.steps) - self.at) // 4) :]
        losses = losses_of(tail)
        if self.diverged or self.fatal or self.loss is None or not losses or len(self.steps) - self.at < 4 * AFTER:
            return False
        norm, loss = median(s.grad_norm or 0.0 for s in tail), median(losses)
        best = min((s.loss for s in self.steps[: self.at] if s.loss is not None), default=0.0)
        if min(losses) > 0.0 and loss > _BACK * best > 0.0:
            return False  # norm and loss may be back at their level before the rise, but that run was not healthy
        return _share_left(self.baseline, self.peak, norm) < _GONE and _share_left(*self.loss, loss) < _GONE

    @property
    def raised(self) -> tuple[float, float] | None:
        """The usual learning rate and the present one, if the rate has just been at least doubled; else None."""
        rates = [s.lr for s in self.steps[max(0, self.at - WINDOW) : self.at + 1] if s.lr]
        if len(rates) < 2 * AFTER:
            return None
        usual, present = median(rates[:-AFTER]), max(rates[-AFTER:])
        return (usual, present) if present >= _RAISED * usual else None

    @property
    def way_up(self) -> Sequence[StepFacts]:
        """The steps from the first one to the largest norm."""
        norms = [s.grad_norm or 0.0 for s in self.steps]
        return self.steps[: norms.index(max(norms)) + 1]


def _share_left(before: float, peak: float, now: float) -> float:
    return (now - before) / max(peak - before, 1e-30)


def find_explosion(process: Process, steps: Sequence[StepFacts], options: Options) -> Explosion | None:
    """Return the first jump that is fatal, or that stays and takes the loss along if it is known.

    Without one, return the divergence of the whole run, else None.
    """
    norms = [s.grad_norm or 0.0 for s in steps]
    for i in range(int(options["min_steps"]), len(steps)):
        baseline = median(norms[max(0, i - WINDOW) : i])
        if baseline <= 0.0 or norms[i] < options["factor"] * baseline:
            continue
        rest, far = norms[i + 1 :], options["fatal"]
        if norms[i] >= far * baseline and len(rest) >= _STAY and max(rest) <= baseline / far:
            return Explosion(process, steps, i, baseline, norms[i], _losses(steps, i), fatal=True)
        after = norms[i : i + AFTER]
        stays = sum(n >= options["factor"] * baseline for n in after)
        if stays < _STAY:
            continue
        losses = _losses(steps, i)
        if losses is None or _undone_share(steps, i, losses) >= options["undone_share"]:
            return Explosion(process, steps, i, baseline, max(norms[i:]), losses)
    return _divergence(process, steps, options)


def _divergence(process: Process, steps: Sequence[StepFacts], options: Options) -> Explosion | None:
    """Return the divergence of a run that ends far above its first loss and norm; None without one.

    A run also diverges if its first update takes loss and norm there, and the loss never comes back. If the loss was
    not positive on every step, its end is no measure: then a loss that falls without end is searched.
    """
    points = [(i, s.loss, s.grad_norm) for i, s in enumerate(steps) if s.loss is not None and s.grad_norm is not None]
    points = [(i, loss, norm) for i, loss, norm in points if math.isfinite(loss) and math.isfinite(norm)]
    if len(points) < options["min_steps"]:
        return None
    (_, loss, norm), far = points[0], options["diverged"]
    lowest = min(loss for _, loss, _ in points)
    ends = [points[-AFTER:]] if lowest > 0.0 else []
    if lowest == loss:  # the loss never came back to its first value
        ends.append(points[1 : 1 + AFTER])
    for end in ends:
        end_loss, end_norm = (median(values[j] for values in end) for j in (1, 2))
        if end_loss >= max(far * abs(loss), options["least_loss"]) and end_norm >= far * norm > 0.0:
            at = next(i for i, _, n in points if n >= min(options["factor"], far) * norm)
            return Explosion(process, steps, at, norm, max(n for *_, n in points), (loss, end_loss), diverged=True)
    return None if lowest > 0.0 else _unbounded(process, steps, points, options)


def _unbounded(
    process: Process, steps: Sequence[StepFacts], known: Sequence[tuple[int, float, float]], options: Options
) -> Explosion | None:
    """Return the divergence of a loss that has fallen far below zero while gradients grew; None without one.

    Such a loss has no minimum nearby.
    """
    first_loss, first_norm = (median(abs(values[j]) for values in known[:AFTER]) for j in (1, 2))
    lowest = min(median(loss for _, loss, _ in known[i : i + AFTER]) for i in range(max(1, len(known) - AFTER + 1)))
    last_norm = median(norm for *_, norm in known[-max(AFTER, len(known) // 4) :])
    grown = first_norm > 0.0 and last_norm >= options["factor"] * first_norm
    if not grown or -lowest < max(options["unbounded"] * first_loss, options["least_loss"]):
        return None
    at = next(i for i, _, norm in known if norm >= options["factor"] * first_norm)
    peak = max(norm for *_, norm in known)
    return Explosion(process, steps, at, first_norm, peak, (first_loss, lowest), diverged=True, unbounded=True)


def _losses(steps: Sequence[StepFacts], i: int) -> tuple[float, float] | None:
    """Median loss before a jump and maximum after it; None if unknown."""
    before = losses_of(steps[max(0, i - WINDOW) : i])
    after = losses_of(steps[i : i + 2 * AFTER])
    return (median(before), max(after)) if before and after else None


def _undone_share(steps: Sequence[StepFacts], i: int, losses: tuple[float, float]) -> float:
    """Share of the progress since the first steps that the jump undid.

    Without progress: infinite if the loss doubled, else 0.
    """
    start = losses_of(steps[: min(8, i)])
    progress = max(0.0, median(start) - losses[0]) if start else 0.0
    lost = losses[1] - losses[0]
    if progress <= _PROGRESS * abs(losses[0]):
        return math.inf if lost > abs(losses[0]) else 0.0
    return lost / progress
