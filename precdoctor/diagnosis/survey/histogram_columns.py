"""Columns of a log as arrays. A log may be hostile: impossible values are refused before anything is sized by them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import CorruptRunError
from precdoctor.numerics.cast_counts import HistogramTable
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram


def magnitudes(frame: pd.DataFrame, column: str = "amax") -> npt.NDArray[np.float64]:
    """A column of magnitudes, shape ``(rows,)``; NaN for nulls, negative and non-finite values."""
    values = frame[column].to_numpy(dtype=np.float64, na_value=math.nan)
    with np.errstate(invalid="ignore"):
        return np.where((values >= 0.0) & (values < math.inf), values, math.nan)


def entries_of(column: pa.Array | pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A list column as the length of each list, shape ``(rows,)``, and all entries; null is empty, or 0."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    entries = pc.fill_null(pc.list_flatten(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, entries


def histograms(table: pa.Table, amax: npt.NDArray[np.float64] | None = None, prefix: str = "exp") -> HistogramTable:
    """The histograms of the columns ``exp_lo`` and ``exp_hist``, one per row; a null is empty.

    Args:
        table: rows of the log.
        amax: of each row, NaN where not known; shape ``(rows,)``.
        prefix: of the two columns' names; ``rel`` for updates relative to their weights.

    Raises:
        CorruptRunError: bins outside the exponent range, or counts below zero.
    """
    name = f"{prefix}_hist"
    lo = pc.fill_null(table[f"{prefix}_lo"], 0).to_numpy().astype(np.int64)
    lengths, entries = entries_of(table[name])
    lengths, entries = _without(table[f"{prefix}_lo"], lengths, entries)
    outside = np.flatnonzero((lengths > 0) & ((lo < EXP_MIN) | (lo + lengths - 1 > EXP_MAX)))
    if outside.size:
        check_bins(name, int(lo[outside[0]]), int(lengths[outside[0]]))
    if (entries < 0).any():
        raise CorruptRunError(f"the log is damaged: a count in {name} is below zero")
    return HistogramTable.of_entries(lo, lengths, entries, amax)


def _without(
    lo: pa.ChunkedArray, lengths: npt.NDArray[np.int64], entries: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The lists without those that have no first bin."""
    if not lo.null_count:
        return lengths, entries
    known = lo.is_valid().to_numpy()
    return np.where(known, lengths, 0), entries[np.repeat(known, lengths)]


def with_exponents(frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Mask of the rows that hold a histogram, shape ``(rows,)``."""
    held: npt.NDArray[np.bool_] = (frame["exp_hist"].notna() & frame["exp_lo"].notna()).to_numpy()
    return held


def exponent_table(frame: pd.DataFrame, amax: npt.NDArray[np.float64] | None = None) -> HistogramTable:
    """The histograms of a frame in which every row holds one.

    Raises:
        CorruptRunError: bins outside the exponent range, or counts below zero.
    """
    lo, counts = frame["exp_lo"].to_numpy(dtype=np.int64), list(frame["exp_hist"])
    for first, row in zip(lo.tolist(), counts, strict=True):
        check_bins("exp_hist", first, len(row))
    table = HistogramTable.of_lists(lo, counts, amax)
    if (table.counts < 0).any():
        raise CorruptRunError("the log is damaged: a count in exp_hist is below zero")
    return table


def exponents(name: str, lo: object, counts: npt.NDArray[np.int64] | None) -> ExponentHistogram:
    """The histogram of one row; nulls give an empty one.

    Raises:
        CorruptRunError: as for :func:`exponent_table`.
    """
    if counts is None or not isinstance(lo, (int, float, np.number)) or math.isnan(float(lo)):
        return ExponentHistogram.of(None, None)
    check_bins(name, int(lo), len(counts))
    return ExponentHistogram.of(int(lo), counts)


def check_bins(name: str, lo: int, count: int) -> None:
    """Refuse bins outside the exponent range.

    Raises:
        CorruptRunError: with the bins.
    """
    if count and not EXP_MIN <= lo <= lo + count - 1 <= EXP_MAX:
        raise CorruptRunError(
            f"the log is damaged: {name} has bins {lo} to {lo + count - 1}; "
            f"there are none outside {EXP_MIN} to {EXP_MAX}"
        )
