"""Operations on frames of measured rows: grouping by tensor, process and step; histograms; pairs of kinds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.survey.arrow_rows import combined
from precdoctor.diagnosis.survey.measures import Floats, column, lists
from precdoctor.diagnosis.survey.rows import Key, Parameter
from precdoctor.diagnosis.survey.view import IDENTITY, Process
from precdoctor.errors import CorruptRunError
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, Histograms

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Columns that identify a weight; columns that identify a step of a process.
PARAMETER = ("root", "module", "name")
AT = ("rank", "attempt", "step")


def magnitudes(frame: pd.DataFrame) -> Floats:
    """Return the column ``amax``, shape ``(rows,)``; NaN for nulls, negative and non-finite values."""
    amax = column(frame, "amax")
    return np.where((amax >= 0.0) & (amax < math.inf), amax, math.nan)


def groups(frame: pd.DataFrame, by: Sequence[str]) -> Ints:
    """Return a group number per row, equal for rows that agree in the columns ``by``; numbered by first appearance."""

    def codes(name: str) -> Ints:
        values = frame[name].array
        own = values.codes if isinstance(values, pd.Categorical) else pd.factorize(np.asarray(values))[0]
        return np.asarray(own, np.int64) + 1

    return pd.factorize(combined(map(codes, by)))[0].astype(np.int64) if len(frame) else np.zeros(0, np.int64)


def firsts(ids: Ints) -> Ints:
    """Return the first row number of each group of :func:`groups`."""
    return np.unique(ids, return_index=True)[1].astype(np.int64)


def lasts(ids: Ints) -> Ints:
    """Return the last row number of each group of :func:`groups`."""
    return ids.size - 1 - firsts(ids[::-1])


def rows_of(ids: Ints, order: npt.ArrayLike | None = None) -> list[Ints]:
    """Return the row numbers of each group of :func:`groups`, stably sorted by ``order`` (a number per row)."""
    ordered = np.argsort(ids, kind="stable") if order is None else np.lexsort((np.asarray(order), ids))
    return np.split(ordered, np.flatnonzero(np.diff(ids[ordered])) + 1) if ids.size else []


def courses(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[Parameter, Process, tuple[Any, ...], Ints]]:
    """Yield per weight: the weight, the first process with a row of it, ``columns`` of its first row, and row numbers.

    The row numbers are those of that process, sorted by step; of several rows of one step only the last.
    """
    ids, process = groups(frame, PARAMETER), frame[["rank", "attempt"]].to_numpy()
    own = np.flatnonzero((process == process[firsts(ids)[ids]]).all(axis=1))
    own = own[lasts(groups(frame.iloc[own], (*PARAMETER, "step")))]
    first = frame.iloc[firsts(ids)]
    described = zip(parameters(first), at(first), zip(*(first[c] for c in columns), strict=True), strict=True)
    for (place, (of, _), values), rows in zip(described, rows_of(ids[own], frame["step"].to_numpy()[own]), strict=True):
        yield place, of, values, own[rows]


def keys(frame: pd.DataFrame) -> list[Key]:
    """Return the tensor that each row is about."""
    return list(zip(*(frame[c].tolist() for c in IDENTITY), strict=True))


def parameters(frame: pd.DataFrame) -> list[Parameter]:
    """Return the weight that each row is about."""
    return list(zip(*(frame[c].tolist() for c in PARAMETER), strict=True))


def at(frame: pd.DataFrame) -> list[tuple[Process, int]]:
    """Return process and step of each row."""
    columns = (frame[c].tolist() for c in AT)
    return [(Process(rank, attempt), step) for rank, attempt, step in zip(*columns, strict=True)]


def step_values(frame: pd.DataFrame, values: Mapping[tuple[Process, int], float]) -> Floats:
    """Look up the value of each row's process and step, shape ``(rows,)``; NaN if ``values`` has none."""
    ids = groups(frame, AT)
    known = np.array([values.get(key, np.nan) for key in at(frame.iloc[firsts(ids)])], dtype=np.float64)
    return known[ids]


def on_steps(frame: pd.DataFrame, steps: Collection[tuple[Process, int]]) -> Mask:
    """Mask of the rows of these steps, shape ``(rows,)``."""
    return step_values(frame, dict.fromkeys(steps, 1.0)) == 1.0


def finite(frame: pd.DataFrame) -> Mask:
    """Mask of the rows without NaN and infinities, shape ``(rows,)``; reads ``nan``, ``pos_inf`` and ``neg_inf``."""
    nan, positive, negative = (column(frame, c) == 0.0 for c in ("nan", "pos_inf", "neg_inf"))
    return nan & positive & negative


def histograms(frame: pd.DataFrame, prefix: str = "exp") -> Histograms:
    """Return the histograms of all rows in the columns ``{prefix}_lo`` and ``{prefix}_hist``.

    ``exp``: exponents of elements; ``rel``: exponents of an update relative to those of its weight; ``block16_amax``
    and the like: amax of blocks.

    Raises:
        CorruptRunError: bins outside the exponent range, or counts below zero.
    """
    lengths, counts = lists(frame, f"{prefix}_hist")
    lo = np.nan_to_num(column(frame, f"{prefix}_lo")).astype(np.int64)
    outside = np.flatnonzero((lengths > 0) & ((lo < EXP_MIN) | (lo + lengths - 1 > EXP_MAX)))
    if outside.size:
        first = int(lo[outside[0]])
        raise CorruptRunError(
            f"the log is damaged: {prefix}_hist has bins {first} to {first + int(lengths[outside[0]]) - 1}; "
            f"there are none outside {EXP_MIN} to {EXP_MAX}"
        )
    if (counts < 0).any():
        raise CorruptRunError(f"the log is damaged: a count in {prefix}_hist is below zero")
    return Histograms(lo, lengths, counts.astype(np.int64))


def by_kind(frame: pd.DataFrame, values: Floats, kinds: Sequence[str]) -> tuple[pd.DataFrame, list[Floats]]:
    """Return one row per weight, process and step, and for each kind its value: NaN without a row, the last of several.

    ``values`` has one per row of ``frame``.
    """
    ids = groups(frame, (*PARAMETER, *AT))
    rows = _places(frame, ids, kinds)
    return frame.iloc[firsts(ids)], [np.append(values, np.nan)[own] for own in rows]


def pairs(frame: pd.DataFrame, first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two frames of equal length: row i of both is about the same weight, process and step.

    Weights and steps that lack a row of one kind are left out; of several rows, the last counts.
    """
    rows = _places(frame, groups(frame, (*PARAMETER, *AT)), (first, second))
    both = rows[:, (rows >= 0).all(axis=0)]
    return frame.iloc[both[0]], frame.iloc[both[1]]


def _places(frame: pd.DataFrame, ids: Ints, kinds: Sequence[str]) -> Ints:
    """Return the last row number of each kind and group, shape ``(kinds, groups)``; -1 if there is none."""
    kind = np.asarray(frame["kind"].array)
    rows = np.full((len(kinds), int(ids.max(initial=-1)) + 1), -1)
    for own, name in zip(rows, kinds, strict=True):
        mine = np.flatnonzero(kind == name)
        own[ids[mine]] = mine
    return rows


def sums(ids: Ints, values: npt.ArrayLike) -> Floats:
    """Return the sum over each group of :func:`groups`, added in the order of the rows."""
    return np.bincount(ids, np.asarray(values, np.float64)).astype(np.float64)


def largest(ids: Ints, values: npt.ArrayLike) -> Floats:
    """Return the largest value of each group of :func:`groups`; NaN if all its values are NaN."""
    found = np.full(int(ids.max(initial=-1)) + 1, np.nan)
    np.fmax.at(found, ids, np.asarray(values, np.float64))
    return found


def worst_rows(ids: Ints, values: npt.ArrayLike) -> Ints:
    """Return the row number of the largest value in each group of :func:`groups`, the first of equals; NaN is least."""
    known = np.nan_to_num(np.asarray(values, np.float64), nan=-np.inf)
    order = np.lexsort((-np.arange(known.size), known, ids))
    return order[np.flatnonzero(np.diff(ids[order], append=-1))]
