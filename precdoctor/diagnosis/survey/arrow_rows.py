"""Conversion of frames and record batches to dictionaries, of their columns to NumPy, and of kept rows to frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.runlog.filters import Query


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as dictionaries of Python values; lists stay NumPy arrays."""
    return _rows({str(name): frame[name].tolist() for name in frame.columns})


def batch_records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a record batch as dictionaries: a missing number or name is NaN, a missing list None."""
    return _rows({name: _values(batch.column(name)) for name in batch.schema.names})


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        names = np.array([*column.dictionary.to_pylist(), math.nan], dtype=object)
        column = names[column.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)]
    else:
        column = column.to_numpy(zero_copy_only=False)
    return column.tolist()


def float_column(batch: pa.RecordBatch, name: str) -> Floats:
    """Return a column as float64, which holds step numbers and counts below 2**53 exactly; null becomes NaN."""
    return batch.column(name).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def int_column(batch: pa.RecordBatch, name: str) -> Ints:
    """Return a column of integers as int64; null becomes 0."""
    return batch.column(name).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def combined(columns: Iterable[Ints]) -> Ints:
    """Return a number per row, equal for rows that agree in all ``columns`` of numbers from 0 on."""
    code, size = np.zeros(1, np.int64), 1
    for own in columns:
        width = int(own.max(initial=0)) + 1
        if size * width >= 1 << 62:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            size = int(code.max(initial=0)) + 1
        code, size = code * width + own, size * width
    return code


#: A column: from row numbers to the values of these rows, as pandas takes them.
_Column = Callable[[Ints], Any]


class KeptRows:
    """Rows of the ``tensors`` table in memory; a column is converted once, however many rules ask for it.

    Args:
        rows: of any columns; its dictionaries are unified.
    """

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._names = frozenset(rows.schema.names)
        self._columns: dict[str, _Column] = {}

    def holds(self, columns: Sequence[str]) -> bool:
        """Return whether the rows have all these columns."""
        return self._names.issuperset(columns)

    def select(self, query: Query) -> pd.DataFrame:
        """Return the rows and columns of a query in the log's order: a frame that the caller may change.

        Null numbers become NaN, names categories, and lists Arrow arrays.
        """
        ids = query.matching(self._rows)
        columns = (self._column(name)(ids) for name in query.columns)
        frame: pd.DataFrame = pd.DataFrame(dict(enumerate(columns)), copy=False)
        frame.columns = pd.Index(query.columns, dtype=object)  # looked up faster than Arrow strings
        return frame

    def _column(self, name: str) -> _Column:
        if name not in self._columns:
            self._columns[name] = _converted(self._rows.column(name))
        return self._columns[name]


def _converted(column: pa.Array) -> _Column:
    """Return the function that selects rows of a column; a selection has the dtype of its own values, null or not."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        names = pd.CategoricalDtype(pd.Index(column.dictionary.to_pylist(), dtype=object))
        return lambda ids: pd.Categorical.from_codes(codes[ids], dtype=names, validate=False)
    if pa.types.is_list(kind):
        return lambda ids: pd.array(column.take(pa.array(ids)), dtype=pd.ArrowDtype(kind))
    if pa.types.is_integer(kind) and column.null_count:
        known, absent = column.fill_null(0).to_numpy(), column.is_null().to_numpy(zero_copy_only=False)
        return lambda ids: np.where(absent[ids], np.nan, known[ids]) if absent[ids].any() else known[ids]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = column.to_numpy(zero_copy_only=False)
        return lambda ids: values[ids]
    return lambda ids: column.take(pa.array(ids)).to_numpy(zero_copy_only=False)
