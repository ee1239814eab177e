"""Conversion of Arrow tables to pandas frames, and of frames and record batches to dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

#: Cache by column name: an Arrow dictionary and its pandas categories. Making these takes longest in a short log.
Categories = dict[str, tuple[pa.Array, pd.CategoricalDtype]]


def frame_of(table: pa.Table, categories: Categories) -> pd.DataFrame:
    """Convert a table to a frame: null numbers become NaN, names categories, and lists Arrow arrays.

    The dictionaries of ``table`` must be unified; new entries are added to the cache ``categories``.
    """
    frame: pd.DataFrame = pd.DataFrame({n: _series(n, table.column(n), categories) for n in table.column_names})
    return frame


def _series(name: str, column: pa.ChunkedArray, categories: Categories) -> Any:
    if pa.types.is_list(column.type):
        return pd.array(column, dtype=pd.ArrowDtype(column.type))
    array = column.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        return array.to_numpy(zero_copy_only=False)
    if name not in categories or not categories[name][0].equals(array.dictionary):
        categories[name] = array.dictionary, categories_of(array.dictionary)
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return pd.Categorical.from_codes(codes, dtype=categories[name][1], validate=False)


def categories_of(dictionary: pa.Array) -> pd.CategoricalDtype:
    """Return the entries of an Arrow dictionary as categories, which are Python strings."""
    return pd.CategoricalDtype(pd.Index(dictionary.to_pylist(), dtype=object))


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
    values: list[Any] = column.tolist()
    return values
