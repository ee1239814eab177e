"""PD404, scaling recipes: which one made the recorded scales, when they lag, and what another would have done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand
from precdoctor.diagnosis.families.fp8.fp8_damage import damage
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import current_snippet
from precdoctor.diagnosis.survey.frames import Mask
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.cast_counts import cast_counts
from precdoctor.numerics.formats import Format
from precdoctor.numerics.fp8_scaling import Amax, AmaxSeries, CurrentScaling, DelayedScaling, Recipe, scale_series

#: Histories that are recognised and proposed; the last is Transformer Engine's default, its tests use 16.
LENGTHS = tuple(1 << k for k in range(11))
#: Margins that are recognised, in binades; chosen empirically.
_MARGINS = (0, 1, 2, 3)
#: Binades within which a recorded scale agrees with a recipe's, chosen empirically (rounding amax to BF16 moves it by
#: 0.006); a scale rounded down to a power of two may lie a binade lower.
_SAME = 0.02
#: Least share of the steps on which the scales must agree; chosen empirically.
_AGREEMENT = 0.8
#: Casts per recipe whose noise is predicted, to bound the time of a replay.
_PREDICTED = 24
#: Peaks up to this factor over the maximum clip too little to reach any limit.
_SLIGHT = 1.1
#: A scale fits an amax if their product exceeds the maximum by at most this factor: scales are rounded.
_FITTED = 1.05


def moves(operand: Operand) -> bool:
    """Return whether the scale changes over the steps: a constant one has no history."""
    scales = operand.scaled.scale
    return bool(scales.size) and bool(scales.max() > 1.01 * scales.min())


def lags(operand: Operand) -> bool:
    """Return whether the scale moves, but not with the tensor's own amax: amax times scale is not constant."""
    peaks = operand.scaled.peak
    return moves(operand) and bool(peaks.max() > 1.1 * peaks.min())


def every_step(operand: Operand) -> bool:
    """Return whether most steps are recorded, so that the log holds the amax history."""
    gaps = np.diff(operand.casts.step)
    return bool(gaps.size) and float(np.median(gaps)) <= 1.0


def recipe_of(operand: Operand) -> DelayedScaling | None:
    """Return the delayed recipe whose scales agree best with the recorded ones; of equals the simplest.

    None if none agrees on most steps, or if steps are missing.
    """
    casts = operand.casts
    known = ~np.isnan(casts.amax)
    if known.sum() < 4 or not every_step(operand):
        return None
    series = AmaxSeries.of(casts.amax, casts.step)
    own = np.log2(casts.scale[known])
    best: tuple[float, DelayedScaling | None] = (0.0, None)
    for margin, length in product(_MARGINS, LENGTHS):
        recipe = DelayedScaling(length, Amax.MAX, margin)
        off = np.log2(scale_series(series, operand.fmt, recipe).scale[known]) - own
        for low, high in ((-_SAME, _SAME), (-_SAME, 1.0 + _SAME)):
            agrees = float(np.mean((off[1:] >= low) & (off[1:] <= high))) - (0.05 if high > 0.5 else 0.0)
            best = max(best, (agrees, recipe), key=lambda item: item[0])
    return best[1] if best[0] >= _AGREEMENT else None


@dataclass(frozen=True)
class ScaleEffect:
    """Effect of a recipe, or of the recorded scales, on the settled casts of an operand.

    Attributes:
        stale: steps on which clipping costs more than the limit.
        clipped: largest share of elements clipped on a step.
        flushed: median share of the non-zero elements flushed.
        flushing: steps that flush more than the limit.
        steps: number of settled casts.
    """

    stale: tuple[int, ...]
    clipped: float
    flushed: float
    flushing: tuple[int, ...]
    steps: int


def recorded_effect(operand: Operand, options: Options) -> ScaleEffect:
    """Return the effect of the recorded scales. A clipped cast is stale only if amax has just jumped past the scale."""
    casts = operand.scaled
    peaks = np.where(_jumped(operand), casts.peak / operand.fmt.max, 0.0)
    return _effect(operand, peaks, np.ones(len(casts)), casts.flushed_share, casts.saturated_share, options)


def _jumped(operand: Operand) -> Mask:
    """Return whether the scale of each scaled cast fitted the amax of one of the two recorded steps before."""
    sized, casts = operand.casts[operand.casts.amax > 0.0], operand.scaled
    before = np.searchsorted(sized.step, casts.step)[:, None] - (1, 2)
    fits = np.append(sized.amax, math.nan)[before] * casts.scale[:, None] <= _FITTED * operand.fmt.max
    return ((before >= 0) & fits).any(axis=1)


def replayed_effect(operand: Operand, recipe: Recipe, options: Options) -> ScaleEffect:
    """Return the effect that ``recipe`` would have had, without the first recorded step, whose history is empty."""
    casts, mine = operand.scaled, operand.settles & ~np.isnan(operand.casts.amax)
    scale = scale_series(AmaxSeries.of(operand.casts.amax, operand.casts.step), operand.fmt, recipe).scale[mine]
    counts = cast_counts(casts.histograms.taken(casts.row), casts.peak, operand.fmt, scale / casts.scale)
    total, peaks = np.maximum(counts.elements, 1.0), casts.peak / casts.scale * scale / operand.fmt.max
    flushed, clipped = counts.flushed[2] / total, counts.saturated[2] / total
    return _effect(operand, peaks, scale / casts.scale, flushed, clipped, options)


def _effect(
    operand: Operand, peaks: Floats, factors: Floats, flushed: Floats, clipped: Floats, options: Options
) -> ScaleEffect:
    """Return the effect of scales on the operand's settled casts of known scale; arrays have the shape ``(casts,)``.

    Args:
        peaks: amax times scale over the format's maximum.
        factors: scale over the recorded scale.
        flushed, clipped: shares of the elements.
    """
    casts = operand.scaled
    over = np.flatnonzero((peaks > _SLIGHT) & (clipped > 0.0))
    chosen = over[:: max(1, math.ceil(len(over) / _PREDICTED))]
    costs = [damage(casts[i].statistics, operand.fmt, float(factors[i])).lost_db for i in chosen]
    bad = chosen[np.array(costs) >= options["stale_db"]]
    # casts whose noise was not predicted count as stale if their peak reaches that of a cast found stale
    least = peaks[bad].min(initial=math.inf)
    stale = over[np.isin(over, bad) | (~np.isin(over, chosen) & (peaks[over] >= least))]
    return ScaleEffect(
        tuple(casts.step[stale].tolist()),
        float(clipped.max(initial=0.0)),
        float(np.median(flushed)) if flushed.size else 0.0,
        tuple(casts.step[flushed >= options["flushed_share"]].tolist()),
        len(casts),
    )


def longer(present: DelayedScaling | None, span: int) -> Iterator[Recipe]:
    """Yield recipes that lag less often, the smallest change first: longer histories, margins, both, current scaling.

    Args:
        present: the recognised recipe.
        span: steps in the log; a longer history cannot be distinguished from one of this length.
    """
    start = present or DelayedScaling(1, Amax.MAX)
    lengths = [k for k in LENGTHS if k > start.history and k <= 2 * span]
    yield from (replace(start, history=k) for k in lengths)
    margins = [start.margin + extra for extra in (1, 2, 3)]
    if present is not None:
        yield from (replace(start, margin=m) for m in margins)
    yield from (replace(start, history=k, margin=m) for m in margins for k in lengths)
    yield CurrentScaling()


def shorter(held: int) -> Iterator[Recipe]:
    """Yield recipes that forget a spike sooner than after ``held`` steps, the smallest change first."""
    yield from (DelayedScaling(k, Amax.MAX) for k in reversed(LENGTHS) if k < held)
    yield CurrentScaling()


def first_accepted(
    operand: Operand, recipes: Iterable[Recipe], accept: Callable[[ScaleEffect], bool], options: Options
) -> tuple[Recipe, ScaleEffect]:
    """Return the first recipe whose effect is accepted, else the last one; with its effect."""
    for recipe in recipes:
        effect = replayed_effect(operand, recipe, options)
        if accept(effect):
            break
    return recipe, effect


def words(recipe: Recipe) -> str:
    """``a history of 16 steps, margin 1``."""
    if isinstance(recipe, DelayedScaling):
        return f"a history of {plural(recipe.history, 'step')}" + (f", margin {recipe.margin}" if recipe.margin else "")
    return "the amax of the step itself"


def snippet(recipe: Recipe, fmt: Format) -> str:
    """Lines of delayed or current scaling by hand, correct at a zero and a non-finite amax."""
    if isinstance(recipe, CurrentScaling):
        return current_snippet(fmt)
    margin = f" / 2**{recipe.margin}" if recipe.margin else ""
    return (
        f"import collections\nimport torch\n\n"
        f"amaxes = collections.deque(maxlen={recipe.history})  # kept with the layer\n"
        f"scale = torch.ones(())\n\n"
        f"usable = [a for a in amaxes if a > 0 and a.isfinite()]\n"
        f"if usable:  # else keep the previous scale\n"
        f"    scale = {fmt.max!r} / max(usable){margin}\n"
        f"y = (x * scale).clamp(-{fmt.max!r}, {fmt.max!r}).to(torch.{fmt.dtype})\n"
        f"amaxes.append(x.abs().amax())\n"
    )
