"""The one pass over the tensors of a log: exact aggregates of all rows, and the rows of chosen steps.

Of a short log, all rows are kept. Of a long log, the rows of at most some :data:`MOST_STEPS` steps are kept: the first
and newest steps, the first bad steps with the steps before them, and others spread evenly. What must not miss a row is
aggregated during the pass: totals per tensor, which kinds were non-finite on which step, and outlying batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.totals import READ, grouped, merged, totals
from precdoctor.errors import RunTooLargeError, RunUnreadableError
from precdoctor.numerics.arrays import Ints
from precdoctor.runlog.caps import Budget
from precdoctor.runlog.costs import TENSOR_COST
from precdoctor.runlog.filters import ATTEMPT
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.parts import joined
from precdoctor.runlog.pieces import Piece, piece_rows
from precdoctor.runlog.schema import TENSORS

#: A log with at most this many rows is kept whole; with histograms a row takes about 400 bytes.
MOST_ROWS = 1 << 18
#: Of a log with more rows, the largest and smallest number of steps to keep.
MOST_STEPS, FEWEST_STEPS = 512, 32
#: The first bad steps to keep; sampled steps to keep before a bad one; bad steps that get them.
_MOST_BAD, _BEFORE, _BAD_WITH_HISTORY = 48, 8, 4
#: Sampled steps to keep at the start, which show how the run began, and bad steps to keep at the end.
_FIRST_STEPS = 8
#: The columns of a kept row: all except block histograms, which take most of the memory and are rarely needed.
COLUMNS = tuple(name for name in TENSORS.names if not name.startswith("block") or name.endswith("_lo"))
ROWS = pa.schema([*(TENSORS.field(name) for name in COLUMNS), ATTEMPT])
_BATCH_COLUMNS = (
    *("step", "rank", "attempt", "root", "module", "kind", "name", "call", "numel", "amax"),
    *("nan", "pos_inf", "neg_inf"),
)
#: Number of non-finite tensors of a kind at a step of a process; ``masks``: of these, how many hold only ``-inf``.
BAD = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("rank", "attempt", "step")),
        pa.field("kind", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("tensors", "masks")),
    ]
)
BATCHES = pa.schema([ROWS.field(name) for name in _BATCH_COLUMNS])
#: Pieces with at most the first number of rows are read together, up to the second number of rows in all.
_SMALL, _TOGETHER = 1 << 16, 1 << 18
#: Copies of a kept row in memory while batches are joined.
_COPIES = 2
#: Partial totals are merged once they have this many rows together.
_PENDING = 1 << 16


@dataclass(frozen=True)
class Survey:
    """The result of one pass over the ``tensors`` table.

    Attributes:
        totals: one row per tensor over all ranks and steps, see :mod:`.totals`.
        steps_of: per kind the steps on which such a tensor has a row, ascending.
        bad: number of non-finite tensors per process, step and kind; schema :data:`BAD`.
        batches: rows of kind ``batch`` that are non-finite, or reach a binade that their tensor had not reached before.
        rows: all rows of the kept steps in the log's order, schema :data:`ROWS`.
        kept: the kept steps; None means all.
    """

    totals: pa.Table
    steps_of: Mapping[str, Ints]
    bad: pa.Table
    batches: pa.Table
    rows: pa.RecordBatch
    kept: frozenset[int] | None

    def covers(self, steps: Iterable[int] | None) -> bool:
        """Return whether :attr:`rows` holds every row of these steps. None stands for the kept steps: always true."""
        return steps is None or self.kept is None or self.kept.issuperset(steps)


def merged_surveys(surveys: Iterable[Survey], budget: Budget) -> Survey:
    """Merge surveys of successive pieces of a log; associative. Drops each survey once it is added, to save memory."""
    sums: list[pa.Table] = []  # merged whenever there are many, everything else at the end
    merge_at, size = _PENDING, 0
    steps_of: dict[str, list[Ints]] = {}
    bad_counts: list[pa.Table] = []
    batches: list[pa.Table] = []
    rows: list[pa.RecordBatch] = []
    kept: frozenset[int] | None = frozenset()
    for part in surveys:
        kept = None if kept is None or part.kept is None else kept | part.kept
        sums.append(part.totals)
        if len(sums) > 1 and sum(t.num_rows for t in sums) > merge_at:
            sums = [merged(sums)]
            merge_at = max(_PENDING, 2 * sums[0].num_rows)
            budget.keep("names", TENSOR_COST * sums[0].num_rows)
        for kind, found in part.steps_of.items():
            steps_of.setdefault(kind, []).append(found)
        for tables, table in ((bad_counts, part.bad), (batches, part.batches), (rows, part.rows)):
            if table.num_rows:  # an empty table would keep its dictionaries in memory
                tables.append(table)
        size += part.rows.nbytes
        budget.keep("rows", _COPIES * size)
        del part, table
    whole = Survey(
        totals=merged(sums),
        steps_of={kind: np.unique(np.concatenate(found)) for kind, found in steps_of.items()},
        bad=_summed_bad(bad_counts),
        batches=_outlying_batches(pa.concat_tables([BATCHES.empty_table(), *batches])),
        rows=concatenated(rows, ROWS),
        kept=kept,
    )
    pa.default_memory_pool().release_unused()
    return whole


@dataclass(frozen=True)
class Task:
    """A worker's share of the pass: pieces of the ``tensors`` table to read.

    Attributes:
        pieces: what to read; several only if all are small.
        steps: the steps whose rows to keep; None means all.
        keeps: whether to keep rows at all.
    """

    pieces: tuple[Piece, ...]
    steps: tuple[int, ...] | None
    keeps: bool


@dataclass(frozen=True)
class Read:
    """A worker's result: the survey of its pieces, and the errors of pieces that it could not read."""

    survey: Survey
    unread: tuple[tuple[Piece, RunUnreadableError], ...]


def tasks_of(pieces: Iterable[tuple[Piece, bool]], steps: Sequence[int] | None) -> list[Task]:
    """Return tasks for all pieces; successive small pieces share a task.

    Args:
        pieces: in the log's order, each with whether to keep its rows.
        steps: the steps whose rows to keep; None means all.
    """
    chosen = None if steps is None else tuple(steps)
    tasks: list[Task] = []
    rows = 0
    for piece, keeps in pieces:
        small = 0 < piece.rows <= _SMALL and piece.since is None
        if tasks and small and 0 < rows <= _TOGETHER - piece.rows and tasks[-1].keeps is keeps:
            tasks[-1] = replace(tasks[-1], pieces=(*tasks[-1].pieces, piece))
            rows += piece.rows
        else:
            tasks.append(Task((piece,), chosen, keeps))
            rows = piece.rows if small else 0
    return tasks


def read_pieces(task: Task, cache: PartCache | None = None) -> Read:
    """Read every row of a task's pieces once and return their survey."""
    steps = task.steps if task.keeps else ()
    more = [name for name in COLUMNS if name not in READ]
    chosen = None if steps is None else np.asarray(steps, np.int64)
    unread: list[tuple[Piece, RunUnreadableError]] = []
    surveys = (_survey_of(batch, chosen) for batch in joined(_rows(task, more, steps, cache, unread)))
    found = merged_surveys(surveys, Budget(task.pieces[0].directory.path.parent))
    return Read(replace(found, kept=None if steps is None else frozenset(steps)), tuple(unread))


def _survey_of(batch: pa.RecordBatch, steps: Ints | None) -> Survey:
    """Return the survey of one batch, keeping its rows of ``steps`` (ascending; None keeps all)."""
    rows = batch
    if steps is not None:
        if not steps.size or "exp_hist" not in batch.schema.names:
            rows = pa.RecordBatch.from_pylist([], ROWS)
        else:
            step = batch.column("step").to_numpy()
            at = np.minimum(np.searchsorted(steps, step), steps.size - 1)
            rows = batch.filter(pa.array(steps[at] == step))
    return Survey(
        totals(batch),
        _steps_of(batch),
        _bad_counts(batch),
        _outlying_batches(_data_batches(batch)),
        rows.select(ROWS.names),
        None,
    )


def _rows(
    task: Task,
    more: Sequence[str],
    steps: Sequence[int] | None,
    cache: PartCache | None,
    unread: list[tuple[Piece, RunUnreadableError]],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the task's pieces; adds those that cannot be read to ``unread``.

    Of several pieces, a damaged one yields no rows. A piece read alone may fail after some: it may be too large to
    hold.
    """
    for piece in task.pieces:
        rows = piece_rows(piece, READ, more, steps, cache)
        try:
            yield from rows if len(task.pieces) == 1 else list(rows)
        except RunTooLargeError:
            raise
        except RunUnreadableError as error:
            unread.append((piece, error))


def chosen_steps(sampled: Sequence[int], bad: Sequence[int], rows: int) -> list[int] | None:
    """Return the steps whose rows to keep, ascending; None means all.

    Args:
        sampled: steps with full statistics, ascending.
        bad: steps with non-finite values, and steps that were cut off, ascending.
        rows: number of rows in the log.
    """
    if rows <= MOST_ROWS or not sampled:
        return None
    limit = max(FEWEST_STEPS, min(MOST_STEPS, MOST_ROWS * len(sampled) // rows))
    newest = limit // 3
    older = sampled[:-newest]
    before_bad = [
        s
        for b in bad[:_BAD_WITH_HISTORY]
        for s in sampled[max(0, int(np.searchsorted(sampled, b)) - _BEFORE) :][:_BEFORE]
    ]
    spread = older[:: max(1, math.ceil(len(older) / (limit - newest)))]
    return sorted(
        {*sampled[:_FIRST_STEPS], *spread, *sampled[-newest:], *bad[:_MOST_BAD], *bad[-_FIRST_STEPS:], *before_bad}
    )


def concatenated(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Concatenate batches column by column and empty the list.

    Rows are the largest share of a survey. This way memory holds them once, plus one column.
    """
    if not batches:
        return pa.RecordBatch.from_pylist([], schema)
    if len(batches) == 1:
        return batches.pop()
    columns = [[b.column(name) for b in batches] for name in reversed(schema.names)]
    batches.clear()
    arrays = [pa.chunked_array(columns.pop(), f.type).unify_dictionaries().combine_chunks() for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _steps_of(batch: pa.RecordBatch) -> dict[str, Ints]:
    """Return the distinct steps of each kind, ascending."""
    step, kind = batch.column("step").to_numpy(), batch.column("kind")
    codes = kind.indices.to_numpy()
    return {str(kind.dictionary[int(c)].as_py()): np.unique(step[codes == c]) for c in np.unique(codes)}


def _bad_counts(batch: pa.RecordBatch) -> pa.Table:
    """Count the non-finite tensors of one batch; schema :data:`BAD`."""
    nan, pos, neg = (batch.column(c).to_numpy() for c in ("nan", "pos_inf", "neg_inf"))
    chosen = batch.filter(pa.array((nan > 0) | (pos > 0) | (neg > 0)))
    if not chosen.num_rows:
        return BAD.empty_table()
    masks = pc.and_(pc.equal(chosen.column("nan"), 0), pc.equal(chosen.column("pos_inf"), 0)).cast(pa.int64())
    names = ("rank", "attempt", "step", "kind")
    columns = {n: chosen.column(n).cast(BAD.field(n).type) for n in names}
    ones = pa.array(np.ones(chosen.num_rows, np.int64))
    return _summed_bad([pa.table({**columns, "tensors": ones, "masks": masks}, schema=BAD)])


def _summed_bad(tables: Sequence[pa.Table]) -> pa.Table:
    whole = pa.concat_tables([BAD.empty_table(), *tables])
    if not whole.num_rows:
        return whole
    keys = ["rank", "attempt", "step", "kind"]
    sums = whole.group_by(keys, use_threads=False).aggregate([("tensors", "sum"), ("masks", "sum")])
    return sums.rename_columns([*keys, "tensors", "masks"]).select(BAD.names).sort_by([(k, "ascending") for k in keys])


def _data_batches(batch: pa.RecordBatch) -> pa.Table:
    """Return the rows of kind ``batch``, with the columns of :data:`BATCHES`."""
    kind = batch.column("kind")
    mine = pc.take(pc.equal(kind.dictionary, "batch"), kind.indices)
    return pa.Table.from_batches([batch.select(_BATCH_COLUMNS).filter(mine)], BATCHES)


def _outlying_batches(delivered: pa.Table) -> pa.Table:
    """Keep of the rows of kind ``batch`` each tensor's first one per process, non-finite ones, and new top binades."""
    if not delivered.num_rows:
        return delivered
    ordered = delivered.unify_dictionaries().sort_by([(n, "ascending") for n in ("rank", "attempt", "step", "call")])
    (batch,) = ordered.combine_chunks().to_batches()
    ids = np.unique(grouped(batch, ("rank", "attempt", "root", "module", "name")), return_inverse=True)[1]
    amax = np.nan_to_num(batch.column("amax").to_numpy(zero_copy_only=False))
    exponent = np.where(amax > 0.0, np.frexp(amax)[1], np.iinfo(np.int32).min)
    counts = [batch.column(c).to_numpy() for c in ("nan", "pos_inf", "neg_inf")]
    kept = np.logical_or.reduce([c > 0 for c in counts])
    order = np.argsort(ids, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
        before = np.maximum.accumulate(np.append(np.iinfo(np.int32).min, exponent[rows]))[:-1]
        kept[rows] |= exponent[rows] > before
        kept[rows[0]] = True
    return pa.Table.from_batches([batch.filter(pa.array(kept))])
