"""Rows as pandas frames: each column is converted once, however many rules ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from precdoctor.numerics.arrays import Ints
from precdoctor.runlog.filters import Query

#: A column: from row numbers to the values of these rows, as pandas takes them.
_Column = Callable[[Ints], Any]


class KeptRows:
    """Rows of the ``tensors`` table in memory.

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
