"""PD512, how the gradients and values of each weight go on over the sampled steps, and which of them have fallen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import module_of_only, parameter_label
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.claims.words import named, plural
from precdoctor.diagnosis.survey.frames import PARAMETER, Ints, firsts, groups, parameters
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Parameter
from precdoctor.diagnosis.survey.view import RunView

#: Fewest sampled steps after the fall: long runs sample one of some hundred.
AFTER = 4
#: At how many places a fall is looked for; it may have begun between two of them.
_PLACES = 16
#: A fall is slow if it was half-way down on all of that many sampled steps before.
_SUDDEN = 2


@dataclass(frozen=True)
class Course:
    """The level of one kind of tensor over the sampled steps.

    Attributes:
        weights: the weights, in the log's order.
        matrices: those with two dimensions or more.
        steps: shape ``(steps,)``.
        levels: log2 of the RMS, shape ``(steps, weights)``; NaN if there is no row, or all elements are zero.
        present: whether there is a row; same shape.
    """

    weights: Sequence[Parameter]
    matrices: frozenset[Parameter]
    steps: Ints
    levels: Floats
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Fall:
    """Weights that have become zero, whose gradient has fallen, or that are given none any more.

    Attributes:
        course: of the weights, or of the gradients that the optimizer is given.
        columns: the numbers of the weights in ``course``.
        first: the first step since which all of them are down.
        before, after: median of log2 RMS over the gradients, before and since; NaN if they have not fallen.
        slow: whether it was half-way down some sampled steps earlier, as an annealed loss is.
        optimizer: the one that is given no gradient any more; empty if the gradients have fallen.
        is_next: whether another optimizer made the steps before.
    """

    course: Course
    columns: Ints
    first: int
    before: float = math.nan
    after: float = math.nan
    slow: bool = False
    optimizer: str = ""
    is_next: bool = False

    @property
    def weights(self) -> list[Parameter]:
        return [self.course.weights[i] for i in self.columns]

    @property
    def labels(self) -> list[str]:
        return [parameter_label(p) for p in self.weights]

    @property
    def module(self) -> tuple[str, str]:
        """Root and FQN of the largest module that holds only such matrices; gradients of vectors are too noisy."""
        fallen = [p for p in self.weights if p in self.course.matrices]
        return module_of_only(fallen[0], fallen, self.course.matrices)

    @property
    def part(self) -> str:
        return f"`{self.module[1] or self.module[0]}`"

    @property
    def count_words(self) -> str:
        """``2 of 8 weights (`a.weight`, `b.weight`)``."""
        return f"{len(self.columns):,} of {plural(len(self.course.weights), 'weight')} ({named(self.labels)})"


def course_of(rows: pd.DataFrame) -> Course:
    """Return the course of these rows; of several ranks, the largest."""
    ids, known = groups(rows, PARAMETER), rows["step"].to_numpy()
    steps, at = np.unique(known, return_inverse=True)
    shape = (steps.size, int(ids.max(initial=-1)) + 1)
    rms, levels, present = column(rows, "rms"), np.full(shape, np.nan), np.zeros(shape, np.bool_)
    with np.errstate(divide="ignore"):
        np.fmax.at(levels, (at, ids), np.where(rms > 0.0, np.log2(rms), np.nan))
    present[at, ids] = True
    first = rows.iloc[firsts(ids)]
    return Course(parameters(first), frozenset(parameters(first[first["dimensions"] >= 2])), steps, levels, present)


def _last_part(steps: Ints, options: Options) -> int:
    """Return the largest row number from which on the steps cover the last ``share`` of the run."""
    begins = steps[-1] + 1 - options["share"] * (steps[-1] + 1 - steps[0])
    return min(int(np.searchsorted(steps, begins, side="right")) - 1, len(steps) - AFTER)


def fallen(course: Course, options: Options) -> Fall | None:
    """Return the weights that have fallen to stay down, themselves and relative to the median weight."""
    own, before = course.levels, int(options["min_steps"])
    last = _last_part(course.steps, options)
    if last < before or own.shape[1] < 2:
        return None
    with np.errstate(invalid="ignore"):
        relative = own - _median(own, axis=1)[:, np.newaxis]
    fall, usual = np.full((2, own.shape[1]), -np.inf)
    seen, ends = np.fmax.reduce(own, axis=0), np.fmax.reduce(own[last:], axis=0)
    candidates = np.flatnonzero(seen - ends >= options["fall"])
    for at in np.unique(np.linspace(before, last, _PLACES).astype(np.int64)) if candidates.size else ():
        early, late = (np.isfinite(part[:, candidates]).sum(0) for part in (own[:at], own[at:]))
        mine = candidates[(early >= before) & (late >= AFTER)]
        medians = [_median(x[:at, mine], axis=0) for x in (own, relative)]
        falls = [m - np.fmax.reduce(x[at:, mine], axis=0) for m, x in zip(medians, (own, relative), strict=True)]
        deeper = np.minimum(*falls)
        better = deeper > fall[mine]
        fall[mine[better]], usual[mine[better]] = deeper[better], medians[0][better]
    columns = np.flatnonzero(fall >= options["fall"])
    if not columns.size:
        return None
    levels, before_fall = own[:, columns], usual[columns]
    depths = np.fmax.reduce(levels - before_fall, axis=1)  # of the weight that has fallen least; NaN without a row
    first = len(depths) - int(np.argmax(np.append(depths[::-1] > -options["fall"], True)))
    slow = bool((depths[max(0, first - _SUDDEN) : first] < -0.5 * options["fall"]).all())
    after = _median(levels[first:], axis=0)
    step = int(course.steps[first])
    return Fall(course, columns, step, float(np.median(before_fall)), float(np.median(after)), slow)


def zeroed(held: Course, options: Options) -> Fall | None:
    """Return the weights that had non-zero elements and have none over the last part of the run."""
    if len(held.steps) < options["min_steps"] + AFTER:
        return None
    last = _last_part(held.steps, options)
    zero = held.present & np.isnan(held.levels)
    lasts = zero[last:].any(0) & ~np.isfinite(held.levels[last:]).any(0)
    columns = np.flatnonzero((np.isfinite(held.levels[:last]).sum(0) >= options["min_steps"]) & lasts)
    if not columns.size:
        return None
    at = 1 + max(int(np.flatnonzero(np.isfinite(held.levels[:, i]))[-1]) for i in columns)
    return Fall(held, columns, int(held.steps[at]))


def withheld(view: RunView, given: Course, made: Course, options: Options) -> Fall | None:
    """Return the weights whose gradients are still made, and no longer given to the run's only optimizer.

    Or to its second one, if that follows the first and holds most of what the first did.
    """
    last = _last_part(given.steps, options)
    if last < 1:
        return None
    gone = (given.present[:last].sum(0) >= options["min_steps"]) & ~given.present[last:].any(0)
    late = np.isfinite(made.levels[made.steps >= given.steps[last]]).sum(0)
    still = {place for place, count in zip(made.weights, late.tolist(), strict=True) if count >= AFTER}
    columns = np.array([i for i in np.flatnonzero(gone).tolist() if given.weights[i] in still], np.int64)
    if not columns.size:
        return None
    at = max(int(np.flatnonzero(given.present[:, i])[-1]) for i in columns)
    until, first = (int(step) for step in given.steps[at : at + 2])
    made_by = [(s.step, s.optimizer) for steps in view.timeline.values() for s in steps if s.optimizer]
    before, since = {name for step, name in made_by if step <= until}, {name for step, name in made_by if step >= first}
    follows = before.isdisjoint(since) and 2 * columns.size < len(given.weights)
    if not since or (len(before | since) > 1 and not follows):
        return None
    return Fall(given, columns, first, optimizer=min(since), is_next=follows)


def _median(values: Floats, axis: int) -> Floats:
    """Return the medians along an axis, without the NaN; NaN where all values are."""
    return pd.DataFrame(values).median(axis=axis).to_numpy()


def level(course: Course, weights: Iterable[Parameter], steps: slice) -> float:
    """Return the median over weights of their medians over some rows; NaN if there is none."""
    wanted = set(weights)
    columns = [i for i, place in enumerate(course.weights) if place in wanted]
    return float(pd.Series(_median(course.levels[steps, columns], axis=0)).median())
