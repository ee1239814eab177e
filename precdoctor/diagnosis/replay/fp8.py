"""What an FP8 scaling recipe would have done to the tensors of a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.replay.columns import exponent_table, magnitudes, with_exponents
from precdoctor.diagnosis.rows import text
from precdoctor.diagnosis.view import BAD_COUNTS, RunView
from precdoctor.errors import NothingRecordedError
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
#: What matrix products are made of: their operands, and the gradients of their results.
KINDS = (*FORWARD, *BACKWARD)
#: What a search tries: Transformer Engine's default is a history of 1024, its tests use 16.
CANDIDATES: tuple[Recipe, ...] = (
    CurrentScaling(),
    *(DelayedScaling(1, Amax.MOST_RECENT, margin) for margin in (0, 1, 2)),
    *(DelayedScaling(k, Amax.MAX, margin) for k in (16, 128, 1024) for margin in (0, 1, 2)),
)
#: A recipe that flushes no more than this is judged by what it saturates.
FLUSHED_TARGET = 0.005

_KEY = ("root", "module", "kind", "name")
_COLUMNS = (*_KEY, "amax", "numel", *BAD_COUNTS)
Key = tuple[str, str, str, str]
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stale:
    """The step on which a scale was furthest behind its tensor.

    Attributes:
        step: number of the step.
        amax: of the tensor.
        scale: in force.
        binades: how far their product lies above the format's maximum.
    """

    step: int
    amax: float
    scale: float
    binades: float


@dataclass(frozen=True)
class TensorReplay:
    """One tensor under a recipe, over all its recorded steps; calls and ranks of it taken together.

    Attributes:
        root, module, kind, name: the tensor.
        format: what it is cast to.
        steps: how many were recorded.
        flushed, saturated: shares of the finite non-zero elements of all steps but the cold ones.
        stale_steps: steps whose amax saturates at the scale in force.
        worst: the furthest behind of them.
        padding_binades: median distance of amax times scale below the format's maximum; None without a value.
        kept_steps: steps that keep the scale before, there being nothing but zeros, NaN and Inf to derive one from.
        cold_steps: ... with none before: a delayed recipe's first step, scaled by 1, and not counted otherwise.
        non_finite_steps: steps with a NaN or Inf in the history, which implementations that admit it would freeze on.
        sparse_steps: steps whose history holds no sample, so that an older one stands in.
    """

    root: str
    module: str
    kind: str
    name: str
    format: str
    steps: int
    flushed: Estimate
    saturated: Estimate
    stale_steps: int
    worst: Stale | None
    padding_binades: float | None
    kept_steps: int
    cold_steps: int
    non_finite_steps: int
    sparse_steps: int


@dataclass(frozen=True)
class RecipeReplay:
    """A recipe on a run.

    Attributes:
        recipe: as the command line spells it.
        tensors: the worst first: most saturated, then most flushed.
        flushed, saturated: shares over all tensors and steps.
        stale_tensors: tensors with at least one stale step.
        history: scales follow from an amax; false where blocks have their own.
    """

    recipe: str
    tensors: tuple[TensorReplay, ...]
    flushed: Estimate
    saturated: Estimate
    stale_tensors: int
    history: bool = True

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Smaller is better: what flushes within the target by its saturation, the rest by both together."""
        over = self.flushed.estimate > FLUSHED_TARGET
        lost = self.saturated.estimate + (self.flushed.estimate if over else 0.0)
        return over, lost, self.flushed.estimate


def hybrid(kind: str) -> Format:
    """E4M3 forward, E5M2 for gradients: what frameworks call HYBRID."""
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
    """Replays a log with each recipe, in the order given.

    Reads the log twice: amax first, of which all scales follow, then the exponents, batch by batch; what is kept in
    memory is some 20 bytes per row and 9 more per recipe. Gradients keep the loss scale they were recorded with, as
    they would when they are cast.

    Args:
        view: the run.
        recipes: current or delayed.
        format_of: the format of a kind.
        kinds: of tensors.
        wanted: whether a module is asked about; default: all.
        steps: half-open range of the steps that are counted; histories still reach back before it.

    Raises:
        NothingRecordedError: no such tensor was recorded.
    """
    log = _AmaxLog.read(view, kinds, wanted)
    if not log.keys:
        raise NothingRecordedError(
            f"{view.run.path} holds no tensor of kind {', '.join(kinds)} that was asked for; nothing can be replayed"
        )
    formats = [format_of(key[2]) for key in log.keys]
    within = _within(log.steps, steps)
    scales = [_Scales.of(log, formats, recipe, within) for recipe in recipes]
    counts = [CastCounts.zeros(len(log.keys)) for _ in recipes]
    by_format = sorted(set(formats), key=lambda f: f.name)
    for frame, row, key in _exponents(view, kinds, log):
        table = exponent_table(frame, magnitudes(frame))
        for fmt in by_format:
            own = np.array([formats[k] is fmt for k in key])
            for i, scale in enumerate(scales):
                mine = own & scale.counted[row]
                found = cast_counts(table.rows(mine), fmt, scale.scale[row[mine]])
                counts[i] = counts[i] + found.summed_by(key[mine], len(log.keys))
    return tuple(
        _replayed(str(recipe), log, formats, scale, count)
        for recipe, scale, count in zip(recipes, scales, counts, strict=True)
    )


def best_delayed(replays: Sequence[RecipeReplay]) -> RecipeReplay:
    """The delayed recipe that loses least (:attr:`RecipeReplay.rank`); of equals, the first.

    Current scaling never loses more, and costs a pass over the tensor: it is what the others are held against.
    """
    return min((r for r in replays if r.recipe.startswith("delayed")), key=lambda r: r.rank)


# -- amax -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _AmaxLog:
    """Amax by tensor and step, calls and ranks together: the one thing kept of every row.

    Attributes:
        keys: the tensors.
        bounds: entries ``bounds[i]:bounds[i + 1]`` are those of tensor i, by step.
    """

    keys: list[Key]
    bounds: _Ints
    steps: _Ints
    amax: _Floats
    non_finite: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, view: RunView, kinds: Sequence[str], wanted: Callable[[str], bool] | None) -> _AmaxLog:
        numbers: dict[Key, int] = dict.fromkeys(vectors(view), -1)
        parts: list[tuple[_Ints, _Ints, _Floats, npt.NDArray[np.bool_]]] = []
        for frame in view.scan(_COLUMNS, kinds):
            code = _codes(frame, numbers, wanted)
            mine = code >= 0
            bad = ((frame["nan"] > 0) | (frame["pos_inf"] > 0)).to_numpy()  # -inf alone is a mask
            amax = magnitudes(frame)
            parts.append((code[mine], frame["step"].to_numpy()[mine], amax[mine], bad[mine]))
        keys = [key for key, number in numbers.items() if number >= 0]
        if not keys:
            nothing = np.zeros(0, dtype=np.int64)
            return cls([], np.zeros(1, dtype=np.int64), nothing, np.zeros(0), np.zeros(0, dtype=np.bool_))
        code, steps, amax, bad = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((steps, code))
        code, steps, amax, bad = code[order], steps[order], amax[order], bad[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(code) != 0) | (np.diff(steps) != 0)])
        code = code[starts]
        return cls(
            keys,
            np.searchsorted(code, np.arange(len(keys) + 1)),
            steps[starts],
            np.fmax.reduceat(amax, starts),
            np.logical_or.reduceat(bad, starts),
        )

    def rows_of(self, code: _Ints, steps: _Ints) -> _Ints:
        """The entries of tensors ``code`` at ``steps``, which must be there."""
        span = int(self.steps.max()) + 1
        owner = np.repeat(np.arange(len(self.keys)), np.diff(self.bounds))
        found: _Ints = np.searchsorted(owner * span + self.steps, code * span + steps)
        return found


def _codes(frame: pd.DataFrame, numbers: dict[Key, int], wanted: Callable[[str], bool] | None) -> _Ints:
    """The number of each row's tensor, new ones counted on; -1 for those not asked about."""
    local, unique = pd.MultiIndex.from_frame(frame[list(_KEY)]).factorize()
    for key in unique:
        if key not in numbers:
            asked = wanted is None or wanted(str(key[1]))
            numbers[key] = sum(n >= 0 for n in numbers.values()) if asked else -1
    out: _Ints = np.array([numbers[key] for key in unique], dtype=np.int64)[local]
    return out


def vectors(view: RunView) -> Iterator[Key]:
    """Biases and gains: parameters that are no operands of a matrix product."""
    for process in view.processes:
        for root in view.facts(process).get("roots") or ():
            for parameter in root.get("parameters") or ():
                if len(parameter.get("shape") or ()) == 1:
                    yield text(root.get("name")), text(parameter.get("module")), "weight", text(parameter.get("name"))


def _within(steps: _Ints, wanted: tuple[int | None, int | None]) -> npt.NDArray[np.bool_]:
    first, stop = wanted
    within: npt.NDArray[np.bool_] = steps >= (first or 0)
    return within if stop is None else within & (steps < stop)


def _exponents(view: RunView, kinds: Sequence[str], log: _AmaxLog) -> Iterator[tuple[pd.DataFrame, _Ints, _Ints]]:
    """Batches of rows with exponents, their entries in the amax log, and their tensors."""
    numbers: dict[Key, int] = {key: i for i, key in enumerate(log.keys)}
    known = set(log.keys)
    for frame in view.scan([*_KEY, "amax", "exp_lo", "exp_hist"], kinds):
        local, unique = pd.MultiIndex.from_frame(frame[list(_KEY)]).factorize()
        code = np.array([numbers[key] if key in known else -1 for key in unique], dtype=np.int64)[local]
        used = (code >= 0) & with_exponents(frame)
        if used.any():
            chosen = frame[used]
            yield chosen, log.rows_of(code[used], chosen["step"].to_numpy()), code[used]


# -- scales -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Course:
    """What the scale of one tensor went through, within the steps asked for; as in :class:`TensorReplay`."""

    steps: int
    stale_steps: int
    worst: Stale | None
    padding_binades: float | None
    kept_steps: int
    cold_steps: int
    non_finite_steps: int
    sparse_steps: int

    @classmethod
    def of(cls, series: AmaxSeries, scales: ScaleSeries, fmt: Format, within: npt.NDArray[np.bool_]) -> _Course:
        counted = within & ~scales.cold
        product = np.where(series.amax > 0.0, series.amax, 0.0) * scales.scale
        beyond = product >= fmt.overflow_limit if fmt.tie_overflows else product > fmt.overflow_limit
        stale = np.flatnonzero(beyond & counted)
        headroom = headroom_binades(series.amax, scales.scale, fmt)
        known = headroom[counted & ~np.isnan(headroom)]
        worst = None
        if stale.size:
            at = int(stale[np.argmin(headroom[stale])])
            worst = Stale(int(series.steps[at]), float(series.amax[at]), float(scales.scale[at]), -float(headroom[at]))
        flags = (scales.kept & ~scales.cold, scales.cold, scales.non_finite, scales.sparse)
        kept, cold, non_finite, sparse = (int(np.count_nonzero(flag & within)) for flag in flags)
        padding = float(np.median(known)) if known.size else None
        steps = int(np.count_nonzero(within))
        return cls(steps, int(stale.size), worst, padding, kept, cold, non_finite, sparse)


@dataclass(frozen=True, eq=False)
class _Scales:
    """One recipe: the scale of every entry of the amax log, and the course of every tensor.

    Attributes:
        counted: entries of the steps asked for, cold ones left out.
    """

    scale: _Floats
    counted: npt.NDArray[np.bool_]
    courses: tuple[_Course, ...]

    @classmethod
    def of(cls, log: _AmaxLog, formats: Sequence[Format], recipe: Recipe, within: npt.NDArray[np.bool_]) -> _Scales:
        scale, counted, courses = np.ones(log.steps.size), within.copy(), []
        for i, fmt in enumerate(formats):
            part = slice(int(log.bounds[i]), int(log.bounds[i + 1]))
            series = AmaxSeries(log.steps[part], log.amax[part], log.non_finite[part])
            found = scale_series(series, fmt, recipe)
            scale[part] = found.scale
            counted[part] &= ~found.cold
            courses.append(_Course.of(series, found, fmt, within[part]))
        return cls(scale, counted, tuple(courses))


def _replayed(
    recipe: str, log: _AmaxLog, formats: Sequence[Format], scales: _Scales, counts: CastCounts
) -> RecipeReplay:
    tensors = []
    for i, (key, fmt, course) in enumerate(zip(log.keys, formats, scales.courses, strict=True)):
        if course.steps:
            shares = counts.row(i)
            told = {f.name: getattr(course, f.name) for f in fields(course)}
            tensors.append(
                TensorReplay(
                    *key, format=fmt.name, flushed=shares.flushed_share(), saturated=shares.saturated_share(), **told
                )
            )
    tensors.sort(key=lambda t: (-t.saturated.estimate, -t.stale_steps, -t.flushed.estimate, t.module, t.kind, t.name))
    stale = sum(t.stale_steps > 0 for t in tensors)
    return RecipeReplay(recipe, tuple(tensors), counts.flushed_share(), counts.saturated_share(), stale)
