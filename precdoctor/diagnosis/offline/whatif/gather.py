"""One pass over the rows of a log: for each tensor and recipe, sums over all rows and the worst row.

Rows of several steps cannot be merged for a prediction: under amax scaling every step has its own scale, and a mean
over steps hides the one that fails. So each recipe is tallied on every row (exact bounds, quick estimates). The sums
are kept, and the row that exceeds the target most is kept in full for the full prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.offline.whatif.keys import KEY_COLUMNS, Keys, TensorKey
from precdoctor.diagnosis.offline.whatif.recipe import LOSS_SCALED, Recipe
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.offline.whatif.trend import Trends, grown
from precdoctor.diagnosis.survey.arrow_rows import float_column
from precdoctor.diagnosis.survey.measures import entries
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.cast_counts import CastCounts
from precdoctor.numerics.group_prediction import tally_groups
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, Histograms
from precdoctor.numerics.tally import Bins, tally

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run


_ROW_COLUMNS = (
    *("step", "rank", "call", "numel", "zero", "amax", "amin_nonzero", "sum_sq", "exp_lo", "exp_hist", "scale"),
)
_FACT_COLUMNS = ("phase", "module_class", "shape", "order", "nan", "pos_inf")
_WIDTH = EXP_MAX - EXP_MIN + 1
#: A plan from fewer steps carries a warning. Chosen empirically.
FEW_STEPS = 8


@dataclass(frozen=True)
class Selection:
    """The rows to gather.

    Attributes:
        steps: half-open range; None for no bound.
    """

    wanted: Callable[[TensorKey], bool]
    kinds: Sequence[str]
    steps: tuple[int | None, int | None] = (None, None)

    def filters(self) -> list[tuple[str, str, Any]]:
        """Return the filter terms for the reader; ``wanted`` is applied later."""
        first, last = self.steps
        terms: list[tuple[str, str, Any]] = [("kind", "in", list(self.kinds))]
        terms += [("step", ">=", first)] if first is not None else []
        terms += [("step", "<", last)] if last is not None else []
        return terms


@dataclass(frozen=True)
class Seen:
    """The rows of one tensor, summarised.

    Attributes:
        module_class: empty if not recorded.
        shape: of its first row; empty if not recorded.
        place: rank, attempt, step and execution order of its first row; order None if not recorded.
        rows: number of finite rows.
        non_finite: number of rows left out because they hold a NaN or +Inf.
        numel: elements of the largest row.
        empty: whether no row has a finite element other than zero.
        worst: for each recipe the row that exceeds the target most; None if no row has the statistics it needs.
        totals: for each recipe the sums over all rows with the statistics it needs.
        drawn: for each recipe the exponents of the scaled elements over all rows, to the nearest binade; empty unless
            ``draw``.
    """

    key: TensorKey
    module_class: str
    shape: tuple[int, ...]
    place: tuple[int, int, int, int | None]
    rows: int
    non_finite: int
    numel: int
    empty: bool
    worst: Mapping[Recipe, dict[str, Any] | None]
    totals: Mapping[Recipe, CastCounts]
    drawn: Mapping[Recipe, ExponentHistogram]

    @property
    def is_matrix(self) -> bool:
        """Whether at least two dimensions are larger than 1."""
        return sum(n > 1 for n in self.shape) >= 2

    @property
    def bits(self) -> float:
        """Bits of an element as recorded; 32 if the dtype is unknown."""
        fmt = known_format(self.key.dtype)
        return float(fmt.bits) if fmt is not None else 32.0


@dataclass
class Gathered:
    """The gathered tensors of a selection."""

    seen: list[Seen]
    #: Steps with at least one row that has the statistics a recipe needs, ascending.
    steps: list[int]
    rows: int
    trends: Trends


def gather(
    run: Run, selection: Selection, recipes: Sequence[Recipe], target: Target, *, draw: bool = False
) -> Gathered:
    """Read the rows of a selection once; memory grows with the number of tensors, not of steps.

    Args:
        draw: also compute :attr:`Seen.drawn`.

    Raises:
        RunUnreadableError: the log is damaged.
    """
    sizes = sorted({r.block_size for r in recipes if r.block_size is not None})
    columns = [*_ROW_COLUMNS, *(f"block{size}_{part}" for size in sizes for part in ("hist", "amax_lo", "amax_hist"))]
    columns += [f"{g}_{part}" for g in {r.grouping for r in recipes} - {None} for part in ("hist", "energy")]
    collector = _Collector(selection, recipes, target, columns, draw=draw)
    for batch in run.batches(
        "tensors", columns=[*KEY_COLUMNS, *_FACT_COLUMNS, *columns, "attempt"], filters=selection.filters()
    ):
        collector.take(batch)
    return collector.result()


class _Collector:
    """The running state of :func:`gather`; its arrays have one entry per tensor and grow with new tensors."""

    def __init__(
        self, selection: Selection, recipes: Sequence[Recipe], target: Target, columns: list[str], *, draw: bool
    ) -> None:
        self._keys = Keys(selection.wanted)
        self._target = target
        self._columns = columns
        self._recipes = [_PerRecipe(recipe, draw=draw) for recipe in recipes]
        #: Per tensor the finite rows, the others, the rows with a non-zero element, and the largest number of elements.
        self._counts = np.zeros((4, 0), dtype=np.int64)
        self._first: list[dict[str, Any]] = []
        self._steps: set[int] = set()
        self._trends = Trends()
        self._rows = 0

    def take(self, batch: pa.RecordBatch) -> None:
        phase = batch.column("phase").cast(pa.string())
        batch = batch.filter(pc.fill_null(pc.not_equal(phase, "recompute"), True))
        ids = self._keys.of(batch)
        batch, ids = batch.filter(pa.array(ids >= 0)), ids[ids >= 0]
        if not ids.size:
            return
        self._grow(batch, ids)
        bad = (float_column(batch, "nan") + float_column(batch, "pos_inf")) > 0
        finite, non_finite, filled, numel = self._counts
        np.add.at(non_finite, ids[bad], 1)
        batch, ids = batch.filter(pa.array(~bad)), ids[~bad]
        step = float_column(batch, "step").astype(np.int64)
        self._rows += ids.size
        np.add.at(finite, ids, 1)
        np.maximum.at(numel, ids, float_column(batch, "numel").astype(np.int64))
        kinds = np.array([key.kind for key in self._keys.known])
        rows = _Rows(batch, self._columns, np.isin(kinds, LOSS_SCALED)[ids], (kinds == "fp8_operand")[ids])
        np.add.at(filled, ids[rows.filled], 1)
        unscaled = np.where(rows.loss_scaled & (rows.recorded > 0.0), 1.0 / rows.recorded, 1.0)
        self._trends.add(ids, step, rows.amax * unscaled, rows.typical * unscaled)
        usable = np.zeros(ids.size, dtype=np.bool_)
        for recipe in self._recipes:
            usable |= recipe.take(rows, ids, self._target)
        self._steps.update(np.unique(step[usable]).tolist())

    def _grow(self, batch: pa.RecordBatch, ids: Ints) -> None:
        """Make room for new tensors and keep the facts of their first rows."""
        before, now = len(self._first), len(self._keys.known)
        if now == before:
            return
        self._counts = grown(self._counts, now)
        self._trends.grow(now)
        for recipe in self._recipes:
            recipe.grow(now)
        fresh, index = np.unique(ids, return_index=True)
        index = index[fresh >= before]
        names = ["module_class", "shape", "order", "rank", "attempt", "step"]
        self._first += batch.select(names).take(pa.array(index)).to_pylist()

    def result(self) -> Gathered:
        """Return the summary of each tensor, in order of first appearance."""
        worst = {per.recipe: per.worst.rows() for per in self._recipes}
        described = zip(self._keys.known, self._first, self._counts.T.tolist(), strict=True)
        seen = []
        for i, (key, first, (finite, non_finite, filled, numel)) in enumerate(described):
            seen.append(
                Seen(
                    key=key,
                    module_class=str(first["module_class"] or ""),
                    shape=tuple(int(n) for n in first["shape"] or ()),
                    place=(first["rank"], first["attempt"], first["step"], first["order"]),
                    rows=finite,
                    non_finite=non_finite,
                    numel=numel,
                    empty=not filled,
                    worst={recipe: rows.get(i) for recipe, rows in worst.items()},
                    totals={per.recipe: per.totals.row(i) for per in self._recipes},
                    drawn={per.recipe: per.drawn(i) for per in self._recipes},
                )
            )
        return Gathered(seen, sorted(self._steps), self._rows, self._trends)


class _Rows:
    """The columns of a batch as arrays, decoded once for all recipes."""

    def __init__(self, batch: pa.RecordBatch, columns: list[str], loss_scaled: Bools, quantised: Bools) -> None:
        self.batch = batch.select(columns)
        self.loss_scaled, self.quantised = loss_scaled, quantised
        self.amax, self.amin = float_column(batch, "amax"), float_column(batch, "amin_nonzero")
        self.recorded = float_column(batch, "scale")
        first = np.nan_to_num(float_column(batch, "exp_lo")).astype(np.int64)
        self.histograms = _histograms(batch.column("exp_hist"), first)
        self.elements = self.histograms.total
        with np.errstate(invalid="ignore", divide="ignore"):  # the geometric mean, which outliers hardly move
            exponents = self.histograms.sums(self.histograms.bins.astype(np.float64) + 0.5)
            self.typical = np.exp2(exponents / self.elements)
        self.filled = self.elements > 0

    def tallied(self, recipe: Recipe) -> tuple[CastCounts, Floats, Bins, Bools]:
        """Return the tally of each row under a recipe, its bins, and a mask of the rows with the needed statistics."""
        if recipe.grouping is not None:
            counted, energy = (self.batch.column(f"{recipe.grouping}_{part}") for part in ("hist", "energy"))
            there = counted.is_valid().to_numpy(zero_copy_only=False)
            elements, sum_sq = np.where(there, self.elements, 0), float_column(self.batch, "sum_sq")
            return *tally_groups(
                _histograms(counted), entries(energy)[1], elements, sum_sq, recipe.format
            ), there | ~self.filled
        bins, known = self._bins(recipe)
        return *tally(bins, recipe.format), bins, known

    def _bins(self, recipe: Recipe) -> tuple[Bins, Bools]:
        """Return the rows' bins under a recipe with scales per tensor or block, and a mask of the rows with bins."""
        if recipe.block is not None:
            assert recipe.rule is not None
            below, amax = (
                _histograms(self.batch.column(f"block{recipe.block_size}_{part}")) for part in ("hist", "amax_hist")
            )
            return Bins.of_blocks(below, amax.total, recipe.block, recipe.rule), (below.total > 0) | ~self.filled
        scale = recipe.multipliers(self.amax, self.recorded, loss_scaled=self.loss_scaled, quantised=self.quantised)
        bins = Bins.of_histograms(self.histograms, self.amax, self.amin, scale)
        return bins, self.filled | ~(self.amax > 0.0)


class _PerRecipe:
    """Sums and worst rows of all tensors under one recipe."""

    def __init__(self, recipe: Recipe, *, draw: bool) -> None:
        self.recipe = recipe
        self._draws = draw
        self.totals = CastCounts.zeros(0)
        self._badness = np.zeros(0)
        self._drawn = np.zeros((_WIDTH if draw else 0, 0), dtype=np.int64)
        self.worst = _WorstRows()

    def grow(self, tensors: int) -> None:
        self.totals = CastCounts(grown(self.totals.counts, tensors))
        self._badness = grown(self._badness, tensors, -1.0)
        self._drawn = grown(self._drawn, tensors)
        self.worst.grow(tensors)

    def take(self, rows: _Rows, ids: Ints, target: Target) -> Bools:
        """Tally the rows and keep each tensor's worst row so far; returns a mask of the rows that were evaluated.

        For blocks and groups, rows without a non-zero element are left out of the mask: they do not show whether their
        step has the statistics.
        """
        found, error, bins, known = rows.tallied(self.recipe)
        self.totals += found.summed_by(ids, self._badness.size)
        if self._draws:
            places = np.clip(_exponents(bins), EXP_MIN, EXP_MAX) - EXP_MIN
            np.add.at(self._drawn, (places, ids[bins.tensor]), bins.counts.astype(np.int64))
        badness = np.where(known, self.recipe.limits(target).badness(found, error), -1.0)
        order = np.lexsort((badness, ids))
        last = np.flatnonzero(np.diff(ids[order], append=-1))  # the worst row of each tensor in this batch
        best = order[last]
        chosen = best[badness[best] > self._badness[ids[best]]]
        self._badness[ids[chosen]] = badness[chosen]
        self.worst.put(rows.batch, chosen, ids[chosen])
        return known & rows.filled if self.recipe.block or self.recipe.grouping else np.ones(ids.size, dtype=np.bool_)

    def drawn(self, tensor: int) -> ExponentHistogram:
        return ExponentHistogram(EXP_MIN, self._drawn[:, tensor]).trimmed()


class _WorstRows:
    """One row of the log per tensor, held as Arrow; replaced rows are dropped in bulk, once they are many."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._at = np.zeros(0, dtype=np.int64)
        self._size = 0

    def grow(self, tensors: int) -> None:
        self._at = grown(self._at, tensors, -1)

    def put(self, batch: pa.RecordBatch, rows: Ints, tensors: Ints) -> None:
        """Replace the rows of ``tensors`` by ``rows`` of the batch."""
        if not rows.size:
            return
        self._tables.append(pa.Table.from_batches([batch]).take(pa.array(rows)))
        self._at[tensors] = np.arange(self._size, self._size + rows.size)
        self._size += rows.size
        if self._size > 4 * self._at.size + 1024:
            self._compact()

    def _compact(self) -> None:
        held = np.flatnonzero(self._at >= 0)
        table = pa.concat_tables(self._tables).take(pa.array(self._at[held]))
        self._tables, self._size = [table.combine_chunks()], held.size
        self._at[held] = np.arange(held.size)

    def rows(self) -> dict[int, dict[str, Any]]:
        if not self._tables:
            return {}
        self._compact()
        return dict(zip(np.flatnonzero(self._at >= 0).tolist(), self._tables[0].to_pylist(), strict=True))


def _exponents(bins: Bins) -> Ints:
    """Return the exponent of each bin's middle, at which it is drawn."""
    middle = np.sqrt(np.maximum(bins.likely_lo, bins.likely_hi / 2.0)) * np.sqrt(np.maximum(bins.likely_hi, 1e-300))
    return np.ceil(np.log2(np.maximum(middle, 1e-300)) - 1.0).astype(np.int64)


def _histograms(column: pa.Array, first: Ints | None = None) -> Histograms:
    """Return a column of counts as histograms from bin ``first`` on, shape ``(rows,)``; from bin 0 if None."""
    lengths, counts = entries(column)
    return Histograms(np.zeros_like(lengths) if first is None else first, lengths, counts.astype(np.int64))
