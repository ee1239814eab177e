"""The one pass over the tensors of a log: exact aggregates of all rows, and the rows of chosen steps.

A short log is kept whole. Of a long one the rows of some :data:`MOST_STEPS` steps are: the first and newest ones, the
first bad ones with those before them, and others spread evenly. Everything that must not miss a row is aggregated while
it is read: totals per tensor, which kinds were non-finite on which step, and the batches that stand out.
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

#: Rows that are kept of a log; with histograms each takes about 400 bytes.
MOST_ROWS = 1 << 18
#: Steps that are kept of a log with more rows than that: at most, and at least.
MOST_STEPS, FEWEST_STEPS = 512, 32
#: Bad steps that are kept, and healthy ones before each of the first of them.
_BAD, _BEFORE, _LED_UP_TO = 48, 8, 4
#: The first steps show how a run began.
_FIRST = 8
#: The columns of a kept row: all but the histograms of blocks, which take most of the room and few questions need.
COLUMNS = tuple(name for name in TENSORS.names if not name.startswith("block") or name.endswith("_lo"))
ROWS = pa.schema([*(TENSORS.field(name) for name in COLUMNS), ATTEMPT])
_BATCH_COLUMNS = (
    *("step", "rank", "attempt", "root", "module", "kind", "name", "call", "dtype", "numel", "order", "amax"),
    *("nan", "pos_inf", "neg_inf"),
)
#: Non-finite tensors of one kind at one step of one process; ``masks``: those that hold nothing but ``-inf``.
BAD = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("rank", "attempt", "step")),
        pa.field("kind", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("tensors", "masks")),
    ]
)
BATCHES = pa.schema([ROWS.field(name) for name in _BATCH_COLUMNS])
#: Pieces of fewer rows are read together, up to as many rows in all.
_SMALL, _TOGETHER = 1 << 16, 1 << 18
#: How often a kept row is in memory while rows are joined.
_COPIES = 2
#: Partial tables are merged when there are this many rows of them.
_PENDING = 1 << 16


@dataclass(frozen=True)
class Survey:
    """What one pass over the ``tensors`` table leaves.

    Attributes:
        totals: one row per tensor over all ranks and steps, see :mod:`.totals`.
        steps_of: the steps on which tensors of each kind have rows, ascending.
        bad: per process, step and kind how many tensors were non-finite; schema :data:`BAD`.
        batches: rows of kind ``batch`` that are non-finite, or reach a binade that their tensor had not reached before.
        rows: all rows of the kept steps in the log's order, schema :data:`ROWS`.
        kept: the kept steps; None: all.
    """

    totals: pa.Table
    steps_of: Mapping[str, Ints]
    bad: pa.Table
    batches: pa.Table
    rows: pa.RecordBatch
    kept: frozenset[int] | None

    def covers(self, steps: Iterable[int] | None) -> bool:
        """Whether all rows of these steps are kept; None means any steps."""
        return steps is None or self.kept is None or self.kept.issuperset(steps)


def merged_surveys(surveys: Iterable[Survey], budget: Budget) -> Survey:
    """The survey of all rows that ``surveys`` are of, in the log's order; associative. Each is let go once it is in."""
    partial = _Partial(budget)
    kept: frozenset[int] | None = frozenset()
    for survey in surveys:
        partial.add(survey)
        kept = None if kept is None or survey.kept is None else kept | survey.kept
        del survey
    return partial.result(kept)


@dataclass(frozen=True)
class Task:
    """What one worker does: read some pieces of the tensors.

    Attributes:
        pieces: of the log; several only where all are small.
        steps: whose rows are kept; None means all.
        keeps: whether rows are kept at all.
    """

    pieces: tuple[Piece, ...]
    steps: tuple[int, ...] | None
    keeps: bool


@dataclass(frozen=True)
class Read:
    """What a worker found: the survey of its pieces, and why some of them could not be read."""

    survey: Survey
    unread: tuple[tuple[Piece, RunUnreadableError], ...]


def tasks_of(pieces: Iterable[tuple[Piece, bool]], steps: Sequence[int] | None) -> list[Task]:
    """Tasks of some size: small pieces that follow one another are read together.

    Args:
        pieces: in the log's order, each with whether its rows are kept.
        steps: of which.
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
    """Read every row of some pieces once.

    Args:
        task: what to read.
        cache: what earlier queries found out about the parts of the run.
    """
    steps = task.steps if task.keeps else ()
    more = [name for name in COLUMNS if name not in READ]
    chosen = None if steps is None else np.asarray(steps, np.int64)
    unread: list[tuple[Piece, RunUnreadableError]] = []
    surveys = (_survey_of(batch, chosen) for batch in joined(_rows(task, more, steps, cache, unread)))
    found = merged_surveys(surveys, Budget(task.pieces[0].directory.path.parent))
    return Read(replace(found, kept=None if steps is None else frozenset(steps)), tuple(unread))


def _survey_of(batch: pa.RecordBatch, steps: Ints | None) -> Survey:
    """The survey of one batch, with its rows of these steps."""
    rows = batch
    if steps is not None:
        if not steps.size or "exp_hist" not in batch.schema.names:
            rows = pa.RecordBatch.from_pylist([], ROWS)
        else:
            step = batch.column("step").to_numpy()
            at = np.minimum(np.searchsorted(steps, step), steps.size - 1)
            rows = batch.filter(pa.array(steps[at] == step))
    return Survey(
        totals(batch), _steps_of(batch), _bad(batch), _peaks(_delivered(batch)), rows.select(ROWS.names), None
    )


def _rows(
    task: Task,
    more: Sequence[str],
    steps: Sequence[int] | None,
    cache: PartCache | None,
    unread: list[tuple[Piece, RunUnreadableError]],
) -> Iterator[pa.RecordBatch]:
    """The rows of all pieces that can be read; of one of several all or none."""
    for piece in task.pieces:
        rows = piece_rows(piece, READ, more, steps, cache)
        try:
            if len(task.pieces) == 1:
                yield from rows
            else:
                yield from list(rows)
        except RunTooLargeError:
            raise
        except RunUnreadableError as error:
            unread.append((piece, error))


def chosen_steps(sampled: Sequence[int], bad: Sequence[int], rows: int) -> list[int] | None:
    """The steps whose rows are kept; None where all are.

    Args:
        sampled: steps with full statistics, ascending.
        bad: steps with non-finite values, or cut off, ascending.
        rows: in the log.
    """
    if rows <= MOST_ROWS or not sampled:
        return None
    limit = max(FEWEST_STEPS, min(MOST_STEPS, MOST_ROWS * len(sampled) // rows))
    newest = limit // 3
    older = sampled[:-newest]
    led = [s for b in bad[:_LED_UP_TO] for s in sampled[max(0, int(np.searchsorted(sampled, b)) - _BEFORE) :][:_BEFORE]]
    spread = older[:: max(1, math.ceil(len(older) / (limit - newest)))]
    return sorted({*sampled[:_FIRST], *spread, *sampled[-newest:], *bad[:_BAD], *bad[-_FIRST:], *led})


class _Partial:
    """A survey in parts, which are put together when there are many and at the end."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0
        self._totals: list[pa.Table] = []
        self._most = _PENDING
        self._bad: list[pa.Table] = []
        self._kinds: dict[str, list[Ints]] = {}
        self._rows: list[pa.RecordBatch] = []
        self._batches: list[pa.Table] = []

    def add(self, part: Survey) -> None:
        """Take in what comes next in the log's order."""
        self._totals.append(part.totals)
        if len(self._totals) > 1 and sum(t.num_rows for t in self._totals) > self._most:
            self._totals = [merged(self._totals)]
            self._most = max(_PENDING, 2 * self._totals[0].num_rows)
            self._budget.keep("names", TENSOR_COST * self._totals[0].num_rows)
        for kind, found in part.steps_of.items():
            self._kinds.setdefault(kind, []).append(found)
        for tables, table in ((self._bad, part.bad), (self._batches, part.batches), (self._rows, part.rows)):
            if table.num_rows:  # an empty one would keep dictionaries alive
                tables.append(table)
        self._size += part.rows.nbytes
        self._budget.keep("rows", _COPIES * self._size)

    def result(self, kept: frozenset[int] | None) -> Survey:
        """Everything that was added, which is given away by that."""
        found = Survey(
            totals=merged(self._totals),
            steps_of={kind: np.unique(np.concatenate(found)) for kind, found in self._kinds.items()},
            bad=_added(self._bad),
            batches=_peaks(pa.concat_tables([BATCHES.empty_table(), *self._batches])),
            rows=_one(self._rows, ROWS),
            kept=kept,
        )
        pa.default_memory_pool().release_unused()
        return found


def _one(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """All batches as one. The list is emptied: rows are the most of a survey, and so are there once and a column."""
    if not batches:
        return pa.RecordBatch.from_pylist([], schema)
    if len(batches) == 1:
        return batches.pop()
    columns = [[b.column(name) for b in batches] for name in reversed(schema.names)]
    batches.clear()
    arrays = [pa.chunked_array(columns.pop(), f.type).unify_dictionaries().combine_chunks() for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _steps_of(batch: pa.RecordBatch) -> dict[str, Ints]:
    """The distinct steps of each kind."""
    step, kind = batch.column("step").to_numpy(), batch.column("kind")
    codes = kind.indices.to_numpy()
    return {str(kind.dictionary[int(c)].as_py()): np.unique(step[codes == c]) for c in np.unique(codes)}


def _bad(batch: pa.RecordBatch) -> pa.Table:
    """The table :data:`BAD` of the rows of one batch."""
    nan, pos, neg = (batch.column(c).to_numpy() for c in ("nan", "pos_inf", "neg_inf"))
    chosen = batch.filter(pa.array((nan > 0) | (pos > 0) | (neg > 0)))
    if not chosen.num_rows:
        return BAD.empty_table()
    masks = pc.and_(pc.equal(chosen.column("nan"), 0), pc.equal(chosen.column("pos_inf"), 0)).cast(pa.int64())
    names = ("rank", "attempt", "step", "kind")
    columns = {n: chosen.column(n).cast(BAD.field(n).type) for n in names}
    ones = pa.array(np.ones(chosen.num_rows, np.int64))
    return _added([pa.table({**columns, "tensors": ones, "masks": masks}, schema=BAD)])


def _added(tables: Sequence[pa.Table]) -> pa.Table:
    whole = pa.concat_tables([BAD.empty_table(), *tables])
    if not whole.num_rows:
        return whole
    keys = ["rank", "attempt", "step", "kind"]
    sums = whole.group_by(keys, use_threads=False).aggregate([("tensors", "sum"), ("masks", "sum")])
    return sums.rename_columns([*keys, "tensors", "masks"]).select(BAD.names).sort_by([(k, "ascending") for k in keys])


def _delivered(batch: pa.RecordBatch) -> pa.Table:
    """The rows of kind ``batch``."""
    kind = batch.column("kind")
    mine = pc.take(pc.equal(kind.dictionary, "batch"), kind.indices)
    return pa.Table.from_batches([batch.select(_BATCH_COLUMNS).filter(mine)], BATCHES)


def _peaks(delivered: pa.Table) -> pa.Table:
    """The rows that are non-finite, or reach a binade that their tensor had not reached before in its process."""
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
