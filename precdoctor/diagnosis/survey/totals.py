"""Exact aggregates of every tensor over all rows of a log, and the merge of such tables.

A table has one row per tensor; schema :data:`SCHEMA`. Merging is associative and independent of order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.arrow_rows import combined, int_column
from precdoctor.numerics.arrays import Ints

#: Columns that identify a tensor over all ranks and steps.
KEYS = ("root", "module", "kind", "name", "dtype", "format", "call")
#: Columns that are summed over rows; null counts as 0.
_COUNTS = ("numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "saturated", "flushed")
SUMS = (*_COUNTS, "rows", "clipping_casts", "flushing_casts")
#: Columns of the ``tensors`` table that the pass always reads.
READ = ("step", "rank", "attempt", *KEYS, *_COUNTS, "amax")
SCHEMA = pa.schema(
    [
        *(pa.field(k, pa.string()) for k in KEYS[:-1]),
        pa.field("call", pa.int64()),
        *(pa.field(s, pa.int64()) for s in SUMS),
        pa.field("amax", pa.float64()),
    ]
)


def totals(batch: pa.RecordBatch) -> pa.Table:
    """Aggregate the rows of one batch that has the columns :data:`READ`."""
    columns = {name: batch.column(name) for name in (*KEYS, *_COUNTS)}
    columns["rows"] = np.ones(batch.num_rows, np.int64)
    for name, counted in (("clipping_casts", "saturated"), ("flushing_casts", "flushed")):
        columns[name] = batch.column(counted).is_valid().cast(pa.int64())
    amax = batch.column("amax")
    columns["amax"] = pc.if_else(pc.greater_equal(amax, 0.0), amax, None)  # not of a damaged log: NaN or below zero
    return _reduced(pa.table(columns))


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tables of aggregates; the empty table for none."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    return table if len(tables) < 2 else _reduced(table)


def _reduced(table: pa.Table) -> pa.Table:
    """Reduce rows to one per tensor: the sums, and the largest amax; null if all are unknown."""
    sums = [(name, "sum", pc.ScalarAggregateOptions(min_count=0)) for name in SUMS]
    reduced = table.group_by(KEYS, use_threads=False).aggregate([*sums, ("amax", "max")])
    return reduced.rename_columns([*KEYS, *SUMS, "amax"]).select(SCHEMA.names).cast(SCHEMA).combine_chunks()


def grouped(batch: pa.RecordBatch, names: Sequence[str]) -> Ints:
    """Return a number per row, equal for rows that agree in all columns ``names`` (dictionaries or integers)."""

    def codes(name: str) -> Ints:
        column = batch.column(name)
        if not pa.types.is_dictionary(column.type):
            return np.unique(int_column(batch, name), return_inverse=True)[1].astype(np.int64)
        indices = column.indices.fill_null(len(column.dictionary))
        return indices.to_numpy(zero_copy_only=False).astype(np.int64)

    return combined(map(codes, names))
