"""What every tensor of a run would become under a recipe, which ones fail, and what would hold for those."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from precdoctor.diagnosis.offline.whatif.gather import Seen, Selection, Totals, gather
from precdoctor.diagnosis.offline.whatif.keys import TensorKey
from precdoctor.diagnosis.offline.whatif.recipe import CACHED, GROUPED_KINDS, LOSS_SCALED, Recipe, wider_than
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.errors import CorruptRunError, UsageError
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import BlockHistogram
from precdoctor.numerics.formats import Format
from precdoctor.numerics.group_prediction import GroupHistogram, predict_groups
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.prediction import Prediction, TensorStatistics, predict
from precdoctor.numerics.tail import flushed_tail
from precdoctor.runlog.schema import KINDS
from precdoctor.runlog.shell import quoted_path

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

#: What matrix products take: the tensors a narrow format is meant for.
OPERAND_KINDS = ("input", "output", "weight", "grad_output", "fp8_operand", *CACHED)
#: A format of 16 bits holds gradients of weights as well.
HALF_KINDS = (*OPERAND_KINDS, "weight_grad")
_HALF_BITS = 16


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        kinds: None for the default of the format; see :func:`default_kinds`.
        module: a glob over module names, ``""`` being the root; None for all.
        steps: half-open.
    """

    recipe: Recipe
    target: Target = field(default_factory=Target)
    kinds: tuple[str, ...] | None = None
    module: str | None = None
    steps: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Remedy:
    """The cheapest recipe tried that holds for a tensor."""

    recipe: Recipe
    prediction: Prediction


@dataclass(frozen=True)
class Forecast:
    """One tensor.

    Attributes:
        step, rank, call: the worst row under the recipe; None where nothing can be told.
        prediction: of that row; None likewise.
        misses: which limits it breaks.
        unknown: why there is no prediction.
        distance: times the nearest limit; the larger, the worse.
        flushed: most likely share that becomes zero: the prediction's, and what the recorded dtype had flushed already
            as far as the recipe would flush it too.
        lost_before: estimated share that the recorded dtype itself had flushed; the prediction is of the rest.
        instead: what holds where the recipe does not; None when nothing tried does.
    """

    seen: Seen
    step: int | None
    rank: int | None
    call: int | None
    prediction: Prediction | None
    misses: tuple[str, ...]
    unknown: str | None
    distance: float
    totals: Totals
    drawn: ExponentHistogram
    flushed: float = 0.0
    lost_before: float = 0.0
    instead: Remedy | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the target is met at every recorded step; None when it cannot be told."""
        return None if self.prediction is None else not self.misses


@dataclass(frozen=True)
class Answer:
    """All of it.

    Attributes:
        kinds: that were asked about.
        forecasts: those that fail, the worst on top; then those that hold; then those of which nothing can be told.
        steps: recorded steps that were looked at, ascending.
        rows: of the log.
        non_finite: rows left out because they hold a NaN or +Inf.
        vectors: one-dimensional weights left out: no recipe casts biases and gains.
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
        """Tensors that miss the target."""
        return tuple(f for f in self.forecasts if f.holds is False)

    @property
    def unknown(self) -> tuple[Forecast, ...]:
        """Tensors nothing can be said of."""
        return tuple(f for f in self.forecasts if f.holds is None)


def default_kinds(recipe: Recipe) -> tuple[str, ...]:
    """Operands of matrix products, of those that the scaling can be asked of; with 16 bits and more the gradients of
    weights as well.
    """
    return tuple(filter(recipe.applies_to, HALF_KINDS if recipe.format.bits >= _HALF_BITS else OPERAND_KINDS))


def forecast(run: Run, question: Question) -> Answer:
    """Ask the log. Two passes at most: one for the recipe, one for what would hold for the tensors that fail.

    Raises:
        UsageError: the selection matches no tensor of the run, or the blocks needed are recorded for none.
        RunUnreadableError: the log is damaged.
    """
    recipe, target = question.recipe, question.target
    kinds = question.kinds or default_kinds(recipe)
    if (alien := next((kind for kind in kinds if not recipe.applies_to(kind)), None)) is not None:
        raise UsageError(_without_groups(recipe, alien))
    skip_vectors = question.kinds is None and recipe.format.bits < _HALF_BITS
    selection = Selection(
        lambda key: question.module is None or fnmatchcase(key.module, question.module), kinds, question.steps
    )
    gathered = gather(run, selection, [recipe], target, draw=True)
    if not gathered.seen:
        raise UsageError(_nothing(run, question, kinds))
    vectors = {s.key for s in gathered.seen if skip_vectors and s.key.kind == "weight" and _is_vector(s)}
    forecasts = [forecast_of(s, 0, recipe, target) for s in gathered.seen if s.key not in vectors]
    if forecasts and all(f.unknown == _not_recorded(recipe) for f in forecasts):
        where = f"`precdoctor show {quoted_path(run.path)}` lists its kinds"
        if question.steps != (None, None):
            where = "of a run's steps 0, 1, 2, 4, 8 ... 64 and every 64th have them"
        elif recipe.grouping is not None:
            where = "`precdoctor record --inference -- python generate.py` records them of a script that trains nothing"
        raise UsageError(f"{_not_recorded(recipe)} for any tensor that was asked about; {where}")
    failing = {f.seen.key for f in forecasts if f.holds is False}
    if failing:
        remedies = _search(run, replace(selection, wanted=failing.__contains__), recipe, target)
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


def _is_vector(seen: Seen) -> bool:
    return bool(seen.shape) and sum(n > 1 for n in seen.shape) < 2


def _without_groups(recipe: Recipe, kind: str) -> str:
    grouping = str(recipe.grouping)
    others = [name for name, kinds in GROUPED_KINDS.items() if kind in kinds]
    instead = ", ".join(others) if others else "tensor"
    what = "no amax per group is recorded" if grouping == "group128" or not others else f"it has no {grouping}s"
    return f"--scaling {grouping} cannot be asked of {kind}: {what}; choose from {instead}"


def _not_recorded(recipe: Recipe) -> str:
    if recipe.grouping is not None:
        return f"statistics per {'128 features' if recipe.grouping == 'group128' else recipe.grouping} are not recorded"
    return f"statistics of 1x{recipe.block_size} blocks are not recorded"


def _nothing(run: Run, question: Question, kinds: Sequence[str]) -> str:
    """Why nothing matched, and what would: which of module, kind and steps is the one to blame."""
    asked = f"no {', '.join(kinds)} tensor" if question.kinds else "no tensor"
    names = {TensorKey(r["root"], r["module"] or "", r["kind"], "", "") for r in _names(run)}
    if question.module is not None and not any(fnmatchcase(k.module, question.module) for k in names):
        from difflib import get_close_matches

        modules = sorted({k.module for k in names if k.module})
        near = get_close_matches(question.module, modules, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, modules[:3]))} ..."
        return f"no recorded module matches {question.module!r}{hint}"
    recorded = sorted({k.kind for k in names}, key=KINDS.index)
    if not set(kinds) & set(recorded):
        return f"{asked} is recorded; there are {', '.join(recorded) or 'no tensors at all'}"
    first, last = question.steps
    where = f" in steps {first or 0}:{'' if last is None else last}" if question.steps != (None, None) else ""
    module = f" of modules {question.module!r}" if question.module is not None else ""
    return f"{asked}{module} is recorded{where}; `precdoctor show {quoted_path(run.path)}` lists what there is"


def _names(run: Run) -> list[dict[str, Any]]:
    import pyarrow as pa

    names: set[tuple[str, ...]] = set()
    columns = ["root", "module", "kind"]
    for batch in run.batches("tensors", columns=columns):
        table = pa.Table.from_batches([batch]).group_by(columns).aggregate([])
        names |= set(zip(*table.to_pydict().values(), strict=True))
    return [dict(zip(columns, name, strict=True)) for name in names]


# -- one tensor -------------------------------------------------------------------------------------------------------


def forecast_of(seen: Seen, index: int, recipe: Recipe, target: Target) -> Forecast:
    """The verdict on one tensor, from the row that was kept for the recipe at ``index``."""
    row = seen.worst[index]
    prediction, unknown = None, None
    if not seen.rows:
        unknown = "every row holds a NaN or Inf"
    elif seen.empty:
        unknown = "no element is finite and not zero at any step"
    elif row is None:
        unknown = _not_recorded(recipe)
    else:
        prediction = predicted(row, seen.key, recipe)
    flushed = before = distance = 0.0
    misses: tuple[str, ...] = ()
    if row is not None and prediction is not None:
        before, flushed = _with_lost(row, seen.key, recipe, prediction)
        misses = tuple(recipe.limits(target).misses(prediction, flushed))
        distance = recipe.limits(target).distance(prediction, flushed)
    return Forecast(
        seen=seen,
        step=None if row is None else int(row["step"]),
        rank=None if row is None else int(row["rank"]),
        call=None if row is None else int(row["call"]),
        prediction=prediction,
        misses=misses,
        unknown=unknown,
        distance=distance,
        totals=seen.totals[index],
        drawn=seen.drawn[index],
        flushed=flushed,
        lost_before=before,
    )


def _with_lost(row: Mapping[str, Any], key: TensorKey, recipe: Recipe, prediction: Prediction) -> tuple[float, float]:
    """What the recorded dtype had flushed before the row was taken, and what is flushed with it; as shares.

    Only the mark that underflow leaves counts, not every zero; see :mod:`precdoctor.numerics.tail`. Where blocks have
    scales of their own, it is not known where the lost elements would have ended up: they are not counted.
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
    """The full prediction of one row.

    Args:
        growth: binades by which the largest elements alone are taken to have grown; scales that follow amax come down
            by as much.

    Raises:
        CorruptRunError: the row contradicts itself.
    """
    source = known_format(key.dtype)
    try:
        if recipe.block is not None:
            return _predicted_blocks(row, recipe)
        if recipe.grouping is not None:
            return _predicted_groups(row, recipe.format, recipe.grouping)
        scale = float(
            recipe.multipliers(
                np.array([math.nan if row["amax"] is None else row["amax"]], dtype=np.float64),
                np.array([math.nan if row["scale"] is None else row["scale"]], dtype=np.float64),
                loss_scaled=np.array([key.kind in LOSS_SCALED]),
                quantised=np.array([key.kind == "fp8_operand"]),
            )[0]
        )
        statistics = TensorStatistics.of_row(row, source)
        return predict(statistics, recipe.format, scale=scale * 2.0**-growth)
    except ValueError as error:
        where = f"step {row['step']}, {key.module or key.root} {key.kind} {key.name}".rstrip()
        raise CorruptRunError(f"a row of the log cannot be true ({where}): {error}") from None


def _predicted_blocks(row: Mapping[str, Any], recipe: Recipe) -> Prediction:
    assert recipe.block is not None
    assert recipe.block_size is not None
    histogram = BlockHistogram.of_row(row, recipe.block_size)
    if histogram is None:  # a tensor without a non-zero element has no blocks to speak of
        histogram = BlockHistogram(recipe.block_size, (), ExponentHistogram.of(None, None))
    # Mantissa bits of the source are of no use here: where the grid lies under a block's own scale is not known.
    return predict_blocks(histogram, recipe.block, amax=row["amax"], rule=recipe.rule)


def _predicted_groups(row: Mapping[str, Any], fmt: Format, grouping: str) -> Prediction:
    histogram = GroupHistogram.of_row(row, grouping) or GroupHistogram((), (), 0, 0.0)  # nothing but zeros
    return predict_groups(histogram, fmt)


def _search(run: Run, selection: Selection, asked: Recipe, target: Target) -> dict[TensorKey, Remedy]:
    """For each tensor the first recipe of the ladder, from the cheapest up, that holds at every step."""
    kinds = set(selection.kinds)
    ladder = [recipe for recipe in wider_than(asked) if any(map(recipe.applies_to, kinds))]
    gathered = gather(run, selection, ladder, target)
    found: dict[TensorKey, Remedy] = {}
    for seen in gathered.seen:
        for index, recipe in enumerate(ladder):
            if recipe.scaling == "channel" and seen.key.kind in ("input", "output"):
                continue  # a product adds up over these channels: their scales cannot be taken out of it
            one = forecast_of(seen, index, recipe, target)
            if one.prediction is not None and not one.misses:
                found[seen.key] = Remedy(recipe, one.prediction)
                break
    return found
