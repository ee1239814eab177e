"""Replays a recorded run with FP8 scaling recipes: current and delayed scaling with one scale per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from precdoctor.diagnosis.offline.replay.amax_log import AmaxLog, Key, exponents_of
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.cast_counts import CastCounts, cast_counts
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import E4M3FN, E5M2, Format
from precdoctor.numerics.fp8_scaling import (
    Amax,
    AmaxSeries,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    ScaleSeries,
    headroom_binades,
    scale_series,
)

FORWARD = ("input", "output", "weight")
BACKWARD = ("grad_output",)
#: Kinds of tensors in matrix products: operands, and gradients of results.
KINDS = (*FORWARD, *BACKWARD)
#: The recipes of a search. Transformer Engine's default history is 1024; its tests use 16.
CANDIDATES: tuple[Recipe, ...] = (
    CurrentScaling(),
    *(DelayedScaling(1, Amax.MOST_RECENT, margin) for margin in (0, 1, 2)),
    *(DelayedScaling(k, Amax.MAX, margin) for k in (16, 128, 1024) for margin in (0, 1, 2)),
)
#: Recipes that flush at most this share are ranked by what they saturate.
FLUSHED_TARGET = 0.005
_UNKNOWN = Estimate(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Stale:
    """The step on which a delayed scale was most outdated.

    Attributes:
        binades: log2 of amax times scale over the format's maximum.
    """

    step: int
    amax: float
    scale: float
    binades: float


@dataclass(frozen=True)
class TensorReplay:
    """One tensor under a recipe, over all its recorded steps, calls and ranks.

    Attributes:
        format: the format it is cast to.
        flushed, saturated: shares of the finite non-zero elements of all steps except cold ones.
        stale_steps: number of steps whose amax saturates at the recipe's scale.
        worst: the most outdated of them; None without one.
        padding_binades: median headroom of amax times scale, in binades; None without a value.
        kept_steps: number of steps whose history holds only zeros, NaN and Inf, so that the scale before stays.
        cold_steps: number of such steps without a scale before, such as the first: scaled by 1, not counted otherwise.
        non_finite_steps: number of steps with a NaN or Inf in the history, which some implementations never recover
            from.
        sparse_steps: number of steps whose history holds no recorded step, so that an older amax is used.
    """

    root: str
    module: str
    kind: str
    name: str
    format: str
    steps: int
    flushed: Estimate
    saturated: Estimate
    stale_steps: int = 0
    worst: Stale | None = None
    padding_binades: float | None = None
    kept_steps: int = 0
    cold_steps: int = 0
    non_finite_steps: int = 0
    sparse_steps: int = 0


@dataclass(frozen=True)
class StepShares:
    """All tensors at one step.

    Attributes:
        flushed, saturated: shares of the finite non-zero elements of the tensors that are not cold.
        stale_tensors: number of these tensors whose amax saturates.
    """

    step: int
    flushed: Estimate
    saturated: Estimate
    stale_tensors: int


@dataclass(frozen=True)
class RecipeReplay:
    """A run replayed with one recipe.

    Attributes:
        recipe: the recipe's name on the command line.
        tensors: most saturated first, then most stale steps, then most flushed.
        flushed, saturated: shares over all tensors and steps.
        stale_tensors: number of tensors with at least one stale step.
        steps: shares of each step; empty for block formats.
        history: whether scales come from the amax of a tensor; False for block formats.
    """

    recipe: str
    tensors: tuple[TensorReplay, ...]
    flushed: Estimate
    saturated: Estimate
    stale_tensors: int
    steps: tuple[StepShares, ...] = ()
    history: bool = True

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key, smaller is better: recipes that flush within the target by saturation, others by both losses."""
        over = self.flushed.estimate > FLUSHED_TARGET
        lost = self.saturated.estimate + (self.flushed.estimate if over else 0.0)
        return over, lost, self.flushed.estimate


def hybrid(kind: str) -> Format:
    """Return E4M3 for forward kinds and E5M2 for gradients, which frameworks call HYBRID."""
    return E5M2 if kind in BACKWARD else E4M3FN


def replay_recipes(
    view: RunView,
    recipes: Sequence[Recipe],
    *,
    format_of: Callable[[str], Format] = hybrid,
    kinds: Sequence[str] = KINDS,
    wanted: Callable[[str], bool] | None = None,
    steps: tuple[int | None, int | None] = (None, None),
) -> tuple[RecipeReplay, ...]:
    """Replay a log with each recipe; results in the order of ``recipes``.

    Reads the kept rows twice: first amax, from which all scales are computed, then the exponents, batch by batch.
    Gradients keep their recorded loss scale, because real casts see it as well.

    Args:
        wanted: returns whether to replay a module; default: all.
        steps: half-open range of the steps to count; histories also use earlier steps.

    Raises:
        NothingRecordedError: no such tensor was recorded.
    """
    log = AmaxLog.read(view, kinds, wanted)
    if not log.keys:
        raise NothingRecordedError(
            f"{view.run.origin} holds no tensor of kind {', '.join(kinds)} that was asked for; nothing can be replayed"
        )
    formats = [format_of(key[2]) for key in log.keys]
    within = _within(log.steps, steps)
    scales = [_Scales.of(log, formats, recipe, within) for recipe in recipes]
    counts = [CastCounts.zeros(len(log.keys)) for _ in recipes]
    numbers = log.numbers
    step_of = np.searchsorted(numbers, log.steps)
    by_step = [CastCounts.zeros(numbers.size) for _ in recipes]
    by_format = sorted(set(formats), key=lambda f: f.name)
    for histograms, amax, row, key in exponents_of(view, kinds, log):
        for fmt in by_format:
            own = np.array([f is fmt for f in formats])[key]
            for i, scale in enumerate(scales):
                mine = np.flatnonzero(own & scale.counted[row])
                found = cast_counts(histograms.taken(mine), amax[mine], fmt, scale.scale[row[mine]])
                counts[i] = counts[i] + found.summed_by(key[mine], len(log.keys))
                by_step[i] = by_step[i] + found.summed_by(step_of[row[mine]], numbers.size)
    out = []
    for recipe, scale, count, step_counts in zip(recipes, scales, counts, by_step, strict=True):
        counted_steps = np.flatnonzero(np.bincount(step_of, within, minlength=numbers.size))
        stale = np.bincount(step_of, scale.stale, minlength=numbers.size)
        shares = tuple(
            StepShares(int(numbers[j]), *step_counts.row(j).shares(), int(stale[j])) for j in counted_steps.tolist()
        )
        out.append(_recipe_replay(str(recipe), scale, count, shares))
    return tuple(out)


def best_delayed(replays: Sequence[RecipeReplay]) -> RecipeReplay:
    """Return the delayed recipe that loses least (:attr:`RecipeReplay.rank`); of equals, the first.

    Current scaling is left out: it never loses more, but costs an additional pass over each tensor.
    """
    return min((r for r in replays if r.recipe.startswith("delayed")), key=lambda r: r.rank)


def _within(steps: Ints, wanted: tuple[int | None, int | None]) -> Bools:
    first, stop = wanted
    within: Bools = steps >= (first or 0)
    return within if stop is None else within & (steps < stop)


# -- scales -----------------------------------------------------------------------------------------------------------


def _tensor(
    key: Key, series: AmaxSeries, scales: ScaleSeries, fmt: Format, within: Bools, beyond: Bools
) -> TensorReplay:
    """Summarise the scales of one tensor over the counted steps; its shares are not yet known."""

    def count(mask: Bools) -> int:
        return int(np.count_nonzero(mask & within))

    counted = within & ~scales.cold
    stale = np.flatnonzero(beyond & counted)
    headroom = headroom_binades(series.amax, scales.scale, fmt)
    known = headroom[counted & ~np.isnan(headroom)]
    worst = None
    if stale.size:
        at = int(stale[np.argmin(headroom[stale])])
        worst = Stale(int(series.steps[at]), float(series.amax[at]), float(scales.scale[at]), -float(headroom[at]))
    return TensorReplay(
        *key,
        format=fmt.name,
        steps=count(within),
        flushed=_UNKNOWN,
        saturated=_UNKNOWN,
        stale_steps=int(stale.size),
        worst=worst,
        padding_binades=float(np.median(known)) if known.size else None,
        kept_steps=count(scales.kept & ~scales.cold),
        cold_steps=count(scales.cold),
        non_finite_steps=count(scales.non_finite),
        sparse_steps=count(scales.sparse),
    )


@dataclass(frozen=True, eq=False)
class _Scales:
    """The scales of one recipe.

    Attributes:
        scale: of each entry of the amax log.
        counted: mask of the entries of the counted steps, without cold ones.
        stale: mask of those whose amax saturates.
        tensors: one :func:`_tensor` for each of the log.
    """

    scale: Floats
    counted: Bools
    stale: Bools
    tensors: tuple[TensorReplay, ...]

    @classmethod
    def of(cls, log: AmaxLog, formats: Sequence[Format], recipe: Recipe, within: Bools) -> _Scales:
        scale, counted, tensors = np.ones(log.steps.size), within.copy(), []
        stale = np.zeros(log.steps.size, dtype=np.bool_)
        for i, (key, fmt) in enumerate(zip(log.keys, formats, strict=True)):
            part = slice(int(log.bounds[i]), int(log.bounds[i + 1]))
            series = AmaxSeries(log.steps[part], log.amax[part], log.non_finite[part])
            found = scale_series(series, fmt, recipe)
            scale[part] = found.scale
            counted[part] &= ~found.cold
            beyond = fmt.overflows(series.amax * found.scale)
            stale[part] = beyond & counted[part]
            tensors.append(_tensor(key, series, found, fmt, within[part], beyond))
        return cls(scale, counted, stale, tuple(tensors))


def _recipe_replay(recipe: str, scales: _Scales, counts: CastCounts, steps: tuple[StepShares, ...]) -> RecipeReplay:
    """Combine scales and counts to the replay of one recipe; tensors without a counted step are left out."""
    shares = ((t, *counts.row(i).shares()) for i, t in enumerate(scales.tensors) if t.steps)
    tensors = [replace(t, flushed=flushed, saturated=saturated) for t, flushed, saturated in shares]
    tensors.sort(key=lambda t: (-t.saturated.estimate, -t.stale_steps, -t.flushed.estimate, t.module, t.kind, t.name))
    stale = sum(t.stale_steps > 0 for t in tensors)
    return RecipeReplay(recipe, tuple(tensors), *counts.shares(), stale, steps)
