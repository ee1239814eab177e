"""The measures of recorded rows that rules ask for: vectorised functions of a frame, one number per row.

A measure is NaN for rows that lack its columns' values; only a missing scale counts as 1. The documentation page
``large-runs`` is made from this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.rows import known_format

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """A function that computes one number per recorded row.

    Attributes:
        name: of the measure and of its column in a frame.
        unit: of the number.
        definition: one line for the documentation.
        columns: columns of the ``tensors`` table that the function reads.
        of: the function, from a frame with these columns to an array of shape ``(rows,)``.
    """

    name: str
    unit: str
    definition: str
    columns: tuple[str, ...]
    of: Callable[[pd.DataFrame], Floats]


def column(frame: pd.DataFrame, name: str) -> Floats:
    """Return a column as float64, shape ``(rows,)``; null becomes NaN."""
    return np.asarray(frame[name].array, dtype=np.float64)


def lists(frame: pd.DataFrame, name: str) -> tuple[npt.NDArray[np.int64], Floats]:
    """Flatten a column of lists: lengths, shape ``(rows,)``, and all entries, list after list; a null list is empty."""
    array = pa.array(frame[name])
    return entries(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)


def entries(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Flatten an Arrow array of lists: lengths and all entries; missing integers become 0, missing floats NaN."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = pc.list_flatten(array)
    if pa.types.is_integer(values.type):
        values = values.fill_null(0)
    return lengths, values.to_numpy(zero_copy_only=False)


def share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> Floats:
    """Return ``part / whole``; NaN where ``whole`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(whole > 0.0, part / whole, np.nan)


def format_values(frame: pd.DataFrame, attribute: str, names: str = "dtype") -> Floats:
    """Look up an attribute such as ``max`` of each row's floating-point format, named in column ``names``.

    NaN for any other dtype; shape ``(rows,)``.
    """
    found = frame[names].astype("category")
    known = [known_format(str(name)) for name in found.cat.categories]
    values = np.array([getattr(fmt, attribute) if fmt is not None else np.nan for fmt in known] + [np.nan])
    return values[found.cat.codes.to_numpy()]


def _non_finite(frame: pd.DataFrame) -> Floats:
    return column(frame, "nan") + column(frame, "pos_inf") + column(frame, "neg_inf")


def _finite(frame: pd.DataFrame) -> Floats:
    return column(frame, "numel") - _non_finite(frame)


def _share_of_all(name: str) -> Callable[[pd.DataFrame], Floats]:
    """Return the function that computes column ``name`` over the number of elements."""
    return lambda frame: share(column(frame, name), column(frame, "numel"))


def _fan_in(frame: pd.DataFrame) -> Floats:
    lengths, sizes = lists(frame, "shape")
    outputs = np.append(sizes, np.nan)[np.where(lengths > 0, np.cumsum(lengths) - lengths, sizes.size)]
    return column(frame, "numel") / np.maximum(outputs, 1.0)


def unscaling(frame: pd.DataFrame) -> Floats:
    """Return the divisor that removes the loss scale from a magnitude: ``scale``, or 1 without one."""
    scale = column(frame, "scale")
    return np.where(scale > 0.0, scale, 1.0)


def _norm(frame: pd.DataFrame) -> Floats:
    with np.errstate(over="ignore"):
        norm: Floats = np.sqrt(column(frame, "sum_sq")) / unscaling(frame)
    return norm


def _multiplier(frame: pd.DataFrame) -> Floats:
    scale = column(frame, "scale")
    return np.where((scale > 0.0) & np.isfinite(scale), scale, 1.0)


_BAD = ("nan", "pos_inf", "neg_inf")
#: All measures by name.
MEASURES = {
    m.name: m
    for m in (
        Measure("non_finite", "elements", "NaN, +Inf and -Inf together", _BAD, _non_finite),
        Measure(
            "alive",
            "elements",
            "finite elements that are not zero",
            ("numel", "zero", *_BAD),
            lambda f: _finite(f) - column(f, "zero"),
        ),
        Measure("zero_share", "fraction", "exact zeros over all elements", ("zero", "numel"), _share_of_all("zero")),
        Measure(
            "at_max_share",
            "fraction",
            "elements equal to the dtype's largest finite value, over all elements",
            ("at_max", "numel"),
            _share_of_all("at_max"),
        ),
        Measure(
            "saturated_share",
            "fraction",
            "elements that a cast clipped, over all elements",
            ("saturated", "numel"),
            _share_of_all("saturated"),
        ),
        Measure(
            "flushed_share",
            "fraction",
            "elements that a cast made zero, over those that were not",
            ("flushed", "numel", "zero"),
            lambda f: share(column(f, "flushed"), column(f, "numel") - column(f, "zero")),
        ),
        Measure(
            "dimensions",
            "dimensions",
            "of the shape",
            ("shape",),
            lambda f: np.where(f["shape"].isna(), np.nan, lists(f, "shape")[0]),
        ),
        Measure("fan_in", "elements", "elements over the first dimension of the shape", ("numel", "shape"), _fan_in),
        Measure(
            "rms",
            "the tensor's",
            "root mean square of the finite elements",
            ("sum_sq", "numel", *_BAD),
            lambda f: np.sqrt(share(column(f, "sum_sq"), _finite(f))),
        ),
        Measure("norm", "the tensor's", "L2 norm of the finite elements, scale taken out", ("sum_sq", "scale"), _norm),
        Measure(
            "intended",
            "elements",
            "of an update: elements that the optimizer meant to change",
            ("numel", "zero", "unchanged"),
            lambda f: column(f, "numel") - column(f, "zero") + column(f, "unchanged"),
        ),
        Measure("finite", "elements", "elements that are neither NaN nor infinite", ("numel", *_BAD), _finite),
        Measure("multiplier", "factor", "the recorded scale; 1 where there is none of use", ("scale",), _multiplier),
    )
}
