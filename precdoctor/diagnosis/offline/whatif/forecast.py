"""Predicts every tensor of a run under a recipe: which ones meet the target, and what would for those that fail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from precdoctor.diagnosis.claims.words import several_models
from precdoctor.diagnosis.offline.whatif.gather import Seen, Selection, gather
from precdoctor.diagnosis.offline.whatif.keys import TensorKey
from precdoctor.diagnosis.offline.whatif.recipe import CACHED, GROUPED_KINDS, LOSS_SCALED, Recipe, wider_than
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import CorruptRunError, UsageError
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import BlockHistogram
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.group_prediction import GroupHistogram, predict_groups
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.prediction import Prediction, TensorStatistics, predict
from precdoctor.numerics.tail import flushed_tail
from precdoctor.runlog.schema import KINDS
from precdoctor.runlog.shell import quoted_path

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

#: Operands of matrix products, which narrow formats are meant for.
OPERAND_KINDS = ("input", "output", "weight", "grad_output", "fp8_operand", *CACHED)
#: Kinds of tensors that 16-bit formats are meant for.
HALF_KINDS = (*OPERAND_KINDS, "weight_grad")
_HALF_BITS = 16


@dataclass(frozen=True)
class Question:
    """What to predict: the tensors, the recipe and the limits.

    Attributes:
        kinds: of tensors; None means :func:`default_kinds`.
        module: a glob over module names (the root's is ``""``); None means all.
        steps: half-open range.
    """

    recipe: Recipe
    target: Target = field(default_factory=Target)
    kinds: tuple[str, ...] | None = None
    module: str | None = None
    steps: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Remedy:
    """The cheapest recipe of the ladder that meets the target for a tensor, and its prediction."""

    recipe: Recipe
    prediction: Prediction


@dataclass(frozen=True)
class Forecast:
    """The prediction for one tensor.

    Attributes:
        step, rank, call: of its worst row under the recipe; None if there is no prediction.
        drawn: exponents over all rows, for a plot.
        prediction: of that row; None if unknown.
        misses: the limits it breaks.
        unknown: why there is no prediction; None if there is one.
        distance: largest ratio of a loss to its limit; the larger, the worse.
        flushed: likely share that becomes zero: that of the prediction, and elements that the recorded dtype had
            already flushed and that the recipe would flush as well.
        lost_before: estimated share that the recorded dtype had already flushed; the prediction is about the rest.
        instead: the remedy if the recipe fails; None if no recipe of the ladder meets the target.
    """

    seen: Seen
    step: int | None
    rank: int | None
    call: int | None
    totals: CastCounts
    drawn: ExponentHistogram
    prediction: Prediction | None = None
    misses: tuple[str, ...] = ()
    unknown: str | None = None
    distance: float = 0.0
    flushed: float = 0.0
    lost_before: float = 0.0
    instead: Remedy | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the target is met at every recorded step; None if there is no prediction."""
        return None if self.prediction is None else not self.misses


@dataclass(frozen=True)
class Answer:
    """The predictions for all tensors of a question.

    Attributes:
        forecasts: tensors that fail, the worst first; then those that hold; then those without a prediction.
        steps: the recorded steps they are based on, ascending.
        non_finite: number of rows left out because they hold a NaN or +Inf.
        vectors: number of one-dimensional weights left out: no recipe casts biases and gains.
    """

    question: Question
    kinds: tuple[str, ...]
    forecasts: tuple[Forecast, ...]
    steps: tuple[int, ...]
    rows: int
    non_finite: int
    vectors: int

    @property
    def failing(self) -> tuple[Forecast, ...]:
        return tuple(f for f in self.forecasts if f.holds is False)

    @cached_property
    def several_models(self) -> bool:
        """Whether tensors of several models are asked about, so that labels must name the root."""
        return several_models((f.seen.key.root, f.seen.key.module) for f in self.forecasts)

    @property
    def unknown(self) -> tuple[Forecast, ...]:
        return tuple(f for f in self.forecasts if f.holds is None)


def default_kinds(recipe: Recipe) -> tuple[str, ...]:
    """Return the operands of matrix products that the scaling applies to; from 16 bits also weight gradients."""
    return tuple(filter(recipe.applies_to, HALF_KINDS if recipe.format.bits >= _HALF_BITS else OPERAND_KINDS))


def forecast(run: Run, question: Question) -> Answer:
    """Predict all tensors of a question, in one pass over the log; a second pass searches remedies for those that fail.

    Raises:
        UsageError: the selection matches no tensor of the run, or none has the block or group statistics it needs.
        RunUnreadableError: the log is damaged.
    """
    recipe, target = question.recipe, question.target
    kinds = question.kinds or default_kinds(recipe)
    if (alien := next((kind for kind in kinds if not recipe.applies_to(kind)), None)) is not None:
        raise UsageError(_no_groups_message(recipe, alien))
    skip_vectors = question.kinds is None and recipe.format.bits < _HALF_BITS
    selection = Selection(
        lambda key: question.module is None or fnmatchcase(key.module, question.module), kinds, question.steps
    )
    gathered = gather(run, selection, [recipe], target, draw=True)
    if not gathered.seen:
        raise UsageError(_no_match_message(run, question, kinds))
    vectors = {s.key for s in gathered.seen if skip_vectors and s.key.kind == "weight" and s.shape and not s.is_matrix}
    forecasts = [forecast_of(s, recipe, target) for s in gathered.seen if s.key not in vectors]
    reasons = {f.unknown for f in forecasts}
    if None not in reasons and _not_recorded(recipe) in reasons:
        where = f"`precdoctor show {quoted_path(run.path)}` lists its kinds"
        if question.steps != (None, None):
            where = "of a run's steps 0, 1, 2, 4, 8 ... 64 and every 64th have them"
        elif recipe.grouping is not None:
            where = "`precdoctor record --inference -- python generate.py` records them of a script that trains nothing"
        raise UsageError(f"{_not_recorded(recipe)} for any tensor that was asked about; {where}")
    if failing := {f.seen.key for f in forecasts if f.holds is False}:
        remedies = _remedies(run, replace(selection, wanted=failing.__contains__), recipe, target)
        forecasts = [replace(f, instead=remedies.get(f.seen.key)) for f in forecasts]
    ordered = sorted(forecasts, key=lambda f: ({False: 0, True: 1, None: 2}[f.holds], -f.distance, f.seen.key))
    return Answer(
        question=question,
        kinds=tuple(kinds),
        forecasts=tuple(ordered),
        steps=tuple(gathered.steps),
        rows=gathered.rows,
        non_finite=sum(s.non_finite for s in gathered.seen),
        vectors=len(vectors),
    )


def _no_groups_message(recipe: Recipe, kind: str) -> str:
    grouping = str(recipe.grouping)
    others = [name for name, kinds in GROUPED_KINDS.items() if kind in kinds]
    instead = ", ".join(others) if others else "tensor"
    what = "no amax per group is recorded" if grouping == "group128" or not others else f"it has no {grouping}s"
    return f"--scaling {grouping} cannot be asked of {kind}: {what}; choose from {instead}"


def _not_recorded(recipe: Recipe) -> str:
    if recipe.grouping is not None:
        return f"statistics per {'128 features' if recipe.grouping == 'group128' else recipe.grouping} are not recorded"
    return f"statistics of 1x{recipe.block_size} blocks are not recorded"


def _no_match_message(run: Run, question: Question, kinds: Sequence[str]) -> str:
    """Return the error message for a question without tensors: whether module, kind or steps matched none."""
    asked = f"no {', '.join(kinds)} tensor" if question.kinds else "no tensor"
    totals = RunView(run).survey.totals.select(["module", "kind"]).to_pydict()
    names = {(module or "", kind) for module, kind in zip(totals["module"], totals["kind"], strict=True)}
    if question.module is not None and not any(fnmatchcase(module, question.module) for module, _ in names):
        from difflib import get_close_matches

        modules = sorted({module for module, _ in names if module})
        near = get_close_matches(question.module, modules, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, modules[:3]))} ..."
        return f"no recorded module matches {question.module!r}{hint}"
    recorded = sorted({kind for _, kind in names}, key=KINDS.index)
    if not set(kinds) & set(recorded):
        return f"{asked} is recorded; there are {', '.join(recorded) or 'no tensors at all'}"
    first, last = question.steps
    where = f" in steps {first or 0}:{'' if last is None else last}" if question.steps != (None, None) else ""
    module = f" of modules {question.module!r}" if question.module is not None else ""
    return f"{asked}{module} is recorded{where}; `precdoctor show {quoted_path(run.path)}` lists what there is"


# -- one tensor -------------------------------------------------------------------------------------------------------


def forecast_of(seen: Seen, recipe: Recipe, target: Target) -> Forecast:
    """Return the prediction for one tensor from its worst row under a recipe of :func:`gather`."""
    row = seen.worst[recipe]
    step, rank, call = (None if row is None else int(row[name]) for name in ("step", "rank", "call"))
    base = Forecast(seen, step, rank, call, seen.totals[recipe], seen.drawn[recipe])
    if not seen.rows:
        return replace(base, unknown="every row holds a NaN or Inf")
    if seen.empty:
        return replace(base, unknown="no element is finite and not zero at any step")
    if row is None:
        return replace(base, unknown=_not_recorded(recipe))
    prediction = predicted(row, seen.key, recipe)
    before, flushed = _flushed_shares(row, seen.key, recipe, prediction)
    limits = recipe.limits(target)
    return replace(
        base,
        prediction=prediction,
        misses=tuple(limits.misses(prediction, flushed)),
        distance=limits.distance(prediction, flushed),
        flushed=flushed,
        lost_before=before,
    )


def _flushed_shares(
    row: Mapping[str, Any], key: TensorKey, recipe: Recipe, prediction: Prediction
) -> tuple[float, float]:
    """Return :attr:`Forecast.lost_before` and :attr:`Forecast.flushed`.

    The share that the recorded dtype flushed is estimated from the histogram near its flush limit, not from all zeros;
    see :mod:`precdoctor.numerics.tail`. With scales per block or group, the lost elements' blocks are unknown, so they
    are not counted as flushed by the recipe.
    """
    fmt, amin, likely = known_format(key.dtype), row["amin_nonzero"], prediction.flushed.estimate
    if fmt is None or amin is None or amin > 4.0 * fmt.min_subnormal or fmt.flush_limit == 0.0:
        return 0.0, likely
    survivors = ExponentHistogram.of(row["exp_lo"], row["exp_hist"])
    tail = flushed_tail(survivors, row["zero"], fmt)
    intended = max(tail.total + survivors.total, 1.0)
    again = 0.0
    if prediction.scale is not None:
        scale = math.ldexp(1.0, round(math.log2(prediction.scale)))
        again = tail.still_flushed(recipe.format, scale) if recipe.format.flush_limit else 0.0
    return tail.total / intended, likely if recipe.block or recipe.grouping else (
        likely * survivors.total + again
    ) / intended


def predicted(row: Mapping[str, Any], key: TensorKey, recipe: Recipe, *, growth: float = 0.0) -> Prediction:
    """Return the full prediction of one row.

    Args:
        growth: binades by which to assume that the largest elements alone have grown; the scale shrinks as much.

    Raises:
        CorruptRunError: the row contradicts itself.
    """
    source = known_format(key.dtype)
    try:
        if recipe.block is not None:
            size = recipe.block.block[1]
            blocks = BlockHistogram.of_row(row, size)
            if blocks is None:  # a tensor without a non-zero element has no block histogram
                blocks = BlockHistogram(size, (), ExponentHistogram.of(None, None))
            # The source's mantissa bits cannot be used here: its grid is not known relative to a block's own scale.
            return predict_blocks(blocks, recipe.block, amax=row["amax"], rule=recipe.rule)
        if recipe.grouping is not None:
            groups = GroupHistogram.of_row(row, recipe.grouping) or GroupHistogram((), (), 0, 0.0)  # nothing but zeros
            return predict_groups(groups, recipe.format)
        amax, recorded = (np.array([row[name]], np.float64) for name in ("amax", "scale"))  # None becomes NaN
        of_loss, quantised = np.array([key.kind in LOSS_SCALED]), np.array([key.kind == "fp8_operand"])
        (scale,) = recipe.multipliers(amax, recorded, loss_scaled=of_loss, quantised=quantised).tolist()
        return predict(TensorStatistics.of_row(row, source), recipe.format, scale=scale * 2.0**-growth)
    except ValueError as error:
        where = f"step {row['step']}, {key.module or key.root} {key.kind} {key.name}".rstrip()
        raise CorruptRunError(f"a row of the log cannot be true ({where}): {error}") from None


def _remedies(run: Run, selection: Selection, asked: Recipe, target: Target) -> dict[TensorKey, Remedy]:
    """Return, for each tensor, the cheapest recipe of the ladder that meets the target at every step, if any."""
    kinds = set(selection.kinds)
    ladder = [recipe for recipe in wider_than(asked) if any(map(recipe.applies_to, kinds))]
    gathered = gather(run, selection, ladder, target)
    found: dict[TensorKey, Remedy] = {}
    for seen in gathered.seen:
        for recipe in ladder:
            if recipe.scaling == "channel" and seen.key.kind in ("input", "output"):
                continue  # a product sums over these channels, so their scales cannot be factored out
            one = forecast_of(seen, recipe, target)
            if one.prediction is not None and not one.misses:
                found[seen.key] = Remedy(recipe, one.prediction)
                break
    return found
