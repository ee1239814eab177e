"""Exact aggregates of every tensor over all rows of a log, and the merge of such tables.

A table has one row per tensor; schema :data:`SCHEMA`. Merging is associative and independent of order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precdoctor.numerics.arrays import Ints

#: Columns that identify a tensor over all ranks and steps.
KEYS = ("root", "module", "kind", "name", "dtype", "format", "call")
#: Columns that are summed over rows; null counts as 0.
SUMS = (
    *("numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "at_max", "saturated", "flushed", "unchanged"),
    *("rows", "clipping_casts", "flushing_casts", "bad_rows"),
)
#: Columns of the ``tensors`` table that the pass always reads.
READ = (
    *("step", "rank", "attempt", *KEYS),
    *("numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "at_max", "saturated", "flushed", "unchanged"),
    *("amax", "order"),
)
#: Columns that say where the amax was: the earliest such step, then the lowest rank and attempt.
PEAK = ("peak_step", "peak_rank", "peak_attempt")
_TEXTS = KEYS[:-1]
SCHEMA = pa.schema(
    [
        *(pa.field(k, pa.string()) for k in _TEXTS),
        pa.field("call", pa.int64()),
        *(pa.field(s, pa.int64()) for s in SUMS),
        pa.field("amax", pa.float64()),
        *(pa.field(p, pa.int64()) for p in PEAK),
        *(pa.field(s, pa.int64()) for s in ("first_step", "last_step", "first_bad_step")),
    ]
)
_NEVER = np.iinfo(np.int64).max


def totals(batch: pa.RecordBatch) -> pa.Table:
    """Aggregate the rows of one batch that has the columns :data:`READ`."""
    codes = grouped(batch, KEYS)
    firsts = np.unique(codes, return_index=True)[1]
    table = {k: batch.column(k).take(pa.array(firsts)).cast(pa.string()) for k in _TEXTS}
    table["call"] = batch.column("call").take(pa.array(firsts)).cast(pa.int64())
    ids = np.unique(codes, return_inverse=True)[1]
    bad = np.logical_or.reduce([_integers(batch, c) > 0 for c in ("nan", "pos_inf", "neg_inf")])
    step = _integers(batch, "step")
    values = {name: _integers(batch, name) for name in SUMS if name in batch.schema.names}
    values["rows"] = np.ones(batch.num_rows, np.int64)
    for name, counted in (("clipping_casts", "saturated"), ("flushing_casts", "flushed")):
        values[name] = batch.column(counted).is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    values["bad_rows"] = bad.astype(np.int64)
    amax = batch.column("amax").to_numpy(zero_copy_only=False)
    peaks = {p: _integers(batch, p.removeprefix("peak_")) for p in PEAK}
    bounds = {"first_step": step, "last_step": step, "first_bad_step": np.where(bad, step, _NEVER)}
    return pa.table({**table, **_reduced(ids, values, amax, peaks, bounds)}, schema=SCHEMA)


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tables of aggregates; the empty table for none."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    if len(tables) < 2:
        return table
    encoded = table.combine_chunks()
    for at, name in enumerate(_TEXTS):
        encoded = encoded.set_column(at, name, encoded.column(name).combine_chunks().dictionary_encode())
    (batch,) = encoded.combine_chunks().to_batches() or [None]
    if batch is None:
        return table
    firsts, ids = np.unique(grouped(batch, KEYS), return_index=True, return_inverse=True)[1:]
    keys = table.select(KEYS).take(pa.array(firsts))
    values = {name: _integers(batch, name) for name in SUMS}
    amax = batch.column("amax").to_numpy(zero_copy_only=False)
    peaks = {p: _integers(batch, p) for p in PEAK}
    bounds = {name: _integers(batch, name) for name in ("first_step", "last_step", "first_bad_step")}
    bounds["first_bad_step"][values["bad_rows"] == 0] = _NEVER
    columns = {name: keys.column(name) for name in KEYS} | _reduced(ids, values, amax, peaks, bounds)
    return pa.table(columns, schema=SCHEMA)


def grouped(batch: pa.RecordBatch, names: Sequence[str]) -> Ints:
    """Return a number per row, equal for rows that agree in all columns ``names`` (dictionaries or integers)."""
    code = np.zeros(batch.num_rows, np.int64)
    for name in names:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            own = column.indices.fill_null(len(column.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
        else:
            own = np.unique(_integers(batch, name), return_inverse=True)[1].astype(np.int64)
        width = int(own.max(initial=0)) + 1
        if math.log2(max(1, int(code.max(initial=0)))) + math.log2(width) > 60:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
        code = code * width + own
    return code


def _reduced(
    ids: Ints, values: dict[str, Ints], amax: npt.NDArray[np.float64], peaks: dict[str, Ints], bounds: dict[str, Ints]
) -> dict[str, pa.Array]:
    """Reduce rows to one entry per id: sums, the largest amax and its first place, first and last steps.

    Args:
        amax: NaN if unknown.
        peaks: step, rank and attempt of each amax.
        bounds: the smallest of each column is taken, of ``last_step`` the largest; :data:`_NEVER` becomes null.
    """
    size = np.where(np.isnan(amax), -1.0, amax)
    order = np.lexsort((*(-peaks[p] for p in reversed(PEAK)), size, ids))
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    last = order[np.append(starts[1:], ids.size) - 1]
    known = size[last] >= 0.0
    found = {name: pa.array(np.add.reduceat(column[order], starts)) for name, column in values.items()}
    found["amax"] = pa.array(size[last], mask=~known)
    found |= {p: pa.array(peaks[p][last], mask=~known) for p in PEAK}
    for name, column in bounds.items():
        reduce = np.maximum if name == "last_step" else np.minimum
        best = reduce.reduceat(column[order], starts)
        found[name] = pa.array(best, mask=best == _NEVER)
    return found


def _integers(batch: pa.RecordBatch, name: str) -> Ints:
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(0)
    values: Ints = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return values
