"""Exact aggregates of every tensor over all rows of a log, and the merge of such tables.

A table has one row per tensor; schema :data:`SCHEMA`. Merging is associative and independent of order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from precdoctor.diagnosis.survey.arrow_rows import int_column
from precdoctor.numerics.arrays import Ints

#: Columns that identify a tensor over all ranks and steps.
KEYS = ("root", "module", "kind", "name", "dtype", "format", "call")
#: Columns that are summed over rows; null counts as 0.
_COUNTS = ("numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal", "saturated", "flushed")
SUMS = (*_COUNTS, "rows", "clipping_casts", "flushing_casts")
#: Columns of the ``tensors`` table that the pass always reads.
READ = ("step", "rank", "attempt", *KEYS, *_COUNTS, "amax")
_TEXTS = KEYS[:-1]
SCHEMA = pa.schema(
    [
        *(pa.field(k, pa.string()) for k in _TEXTS),
        pa.field("call", pa.int64()),
        *(pa.field(s, pa.int64()) for s in SUMS),
        pa.field("amax", pa.float64()),
    ]
)


def totals(batch: pa.RecordBatch) -> pa.Table:
    """Aggregate the rows of one batch that has the columns :data:`READ`."""
    values = {name: int_column(batch, name) for name in _COUNTS}
    values["rows"] = np.ones(batch.num_rows, np.int64)
    for name, counted in (("clipping_casts", "saturated"), ("flushing_casts", "flushed")):
        values[name] = batch.column(counted).is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    return _reduced(batch, values)


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tables of aggregates; the empty table for none."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    if len(tables) < 2 or not table.num_rows:
        return table
    encoded = table.combine_chunks()
    for at, name in enumerate(_TEXTS):
        encoded = encoded.set_column(at, name, encoded.column(name).combine_chunks().dictionary_encode())
    (batch,) = encoded.combine_chunks().to_batches()
    return _reduced(batch, {name: int_column(batch, name) for name in SUMS})


def grouped(batch: pa.RecordBatch, names: Sequence[str]) -> Ints:
    """Return a number per row, equal for rows that agree in all columns ``names`` (dictionaries or integers)."""
    code = np.zeros(batch.num_rows, np.int64)
    for name in names:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            own = column.indices.fill_null(len(column.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
        else:
            own = np.unique(int_column(batch, name), return_inverse=True)[1].astype(np.int64)
        width = int(own.max(initial=0)) + 1
        if math.log2(max(1, int(code.max(initial=0)))) + math.log2(width) > 60:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
        code = code * width + own
    return code


def _reduced(batch: pa.RecordBatch, values: dict[str, Ints]) -> pa.Table:
    """Reduce rows to one per tensor: the sums of ``values`` and the largest amax; null if all are unknown."""
    firsts, ids = np.unique(grouped(batch, KEYS), return_index=True, return_inverse=True)[1:]
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    amax = batch.column("amax").to_numpy(zero_copy_only=False)
    amax = np.maximum.reduceat(np.where(np.isnan(amax), -1.0, amax)[order], starts)
    columns = {k: batch.column(k).take(pa.array(firsts)).cast(SCHEMA.field(k).type) for k in KEYS}
    columns |= {name: pa.array(np.add.reduceat(column[order], starts)) for name, column in values.items()}
    return pa.table({**columns, "amax": pa.array(amax, mask=amax < 0.0)}, schema=SCHEMA)
