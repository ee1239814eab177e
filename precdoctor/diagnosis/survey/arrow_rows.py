"""Conversion of frames and record batches to dictionaries, and of their columns to NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from precdoctor.numerics.arrays import Floats, Ints


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
