"""Frames of measured rows: the tensor, process and step that a row is about, its histogram, and its partner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.survey.measures import Floats, column, lists
from precdoctor.diagnosis.survey.rows import Key, Parameter
from precdoctor.diagnosis.survey.view import IDENTITY, Process
from precdoctor.errors import CorruptRunError
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, Histograms

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Columns that identify a weight, and those of a step of a process.
PARAMETER = ("root", "module", "name")
AT = ("rank", "attempt", "step")


def magnitudes(frame: pd.DataFrame) -> Floats:
    """The column ``amax``, shape ``(rows,)``; NaN for nulls, negative and non-finite values."""
    amax = column(frame, "amax")
    return np.where((amax >= 0.0) & (amax < math.inf), amax, math.nan)


def with_exponents(frame: pd.DataFrame) -> Mask:
    """Mask of the rows that hold a histogram, shape ``(rows,)``."""
    held: Mask = (frame["exp_hist"].notna() & frame["exp_lo"].notna()).to_numpy()
    return held


def groups(frame: pd.DataFrame, by: Sequence[str]) -> Ints:
    """One number per row, the same for rows that agree in the columns ``by``; counted in order of first appearance."""
    code, size = np.zeros(len(frame), np.int64), 1
    for name in by if len(frame) else ():
        values = frame[name].array
        own = values.codes if isinstance(values, pd.Categorical) else pd.factorize(np.asarray(values))[0]
        width = int(own.max()) + 2
        if size * width >= 1 << 62:
            code = pd.factorize(code)[0].astype(np.int64)
            size = int(code.max()) + 1
        code, size = code * width + own + 1, size * width
    return pd.factorize(code)[0].astype(np.int64)


def firsts(ids: Ints) -> Ints:
    """The first row of each group of :func:`groups`."""
    return np.unique(ids, return_index=True)[1].astype(np.int64)


def lasts(ids: Ints) -> Ints:
    """The last row of each group of :func:`groups`."""
    return ids.size - 1 - firsts(ids[::-1])


def rows_of(ids: Ints, order: npt.ArrayLike | None = None) -> list[Ints]:
    """Per group of :func:`groups` its rows, sorted by ``order`` (a number per row; equal ones stay as they are)."""
    ordered = np.argsort(ids, kind="stable") if order is None else np.lexsort((np.asarray(order), ids))
    return np.split(ordered, np.flatnonzero(np.diff(ids[ordered])) + 1) if ids.size else []


def courses(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[Parameter, Process, tuple[Any, ...], Ints]]:
    """Each weight, the first process with rows of it, ``columns`` of the first row, and the process's rows by step.

    Of several rows of one step the last one is taken.
    """
    ids, process = groups(frame, PARAMETER), frame[["rank", "attempt"]].to_numpy()
    own = np.flatnonzero((process == process[firsts(ids)[ids]]).all(axis=1))
    own = own[lasts(groups(frame.iloc[own], (*PARAMETER, "step")))]
    first = frame.iloc[firsts(ids)]
    described = zip(parameters(first), at(first), zip(*(first[c] for c in columns), strict=True), strict=True)
    for (place, (of, _), values), rows in zip(described, rows_of(ids[own], frame["step"].to_numpy()[own]), strict=True):
        yield place, of, values, own[rows]


def keys(frame: pd.DataFrame) -> list[Key]:
    """The tensor of each row."""
    return list(zip(*(frame[c].tolist() for c in IDENTITY), strict=True))


def parameters(frame: pd.DataFrame) -> list[Parameter]:
    """The weight of each row."""
    return list(zip(*(frame[c].tolist() for c in PARAMETER), strict=True))


def at(frame: pd.DataFrame) -> list[tuple[Process, int]]:
    """Process and step of each row."""
    columns = (frame[c].tolist() for c in AT)
    return [(Process(rank, attempt), step) for rank, attempt, step in zip(*columns, strict=True)]


def step_values(frame: pd.DataFrame, values: Mapping[tuple[Process, int], float]) -> Floats:
    """The value of each row's process and step; NaN where there is none."""
    ids = groups(frame, AT)
    known = np.array([values.get(key, np.nan) for key in at(frame.iloc[firsts(ids)])], dtype=np.float64)
    found: Floats = known[ids]
    return found


def on_steps(frame: pd.DataFrame, steps: set[tuple[Process, int]]) -> Mask:
    """Whether each row is of one of these steps."""
    mask: Mask = step_values(frame, dict.fromkeys(steps, 1.0)) == 1.0
    return mask


def finite(frame: pd.DataFrame) -> Mask:
    """Whether each row's tensor has no NaN and no infinity; of the columns ``nan``, ``pos_inf`` and ``neg_inf``."""
    nan, positive, negative = (column(frame, c) == 0.0 for c in ("nan", "pos_inf", "neg_inf"))
    mask: Mask = nan & positive & negative
    return mask


def histograms(frame: pd.DataFrame, prefix: str = "exp") -> Histograms:
    """The histograms of all rows; ``prefix`` is ``exp`` or ``rel``.

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
    """One row per weight and step, and per kind its value there: NaN without a row, the last one of several.

    Args:
        values: one per row of ``frame``.
    """
    ids = groups(frame, (*PARAMETER, *AT))
    rows = _places(frame, ids, kinds)
    return frame.iloc[firsts(ids)], [np.append(values, np.nan)[own] for own in rows]


def pairs(frame: pd.DataFrame, first: str, second: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the two kinds about one weight at one step, row by row; where a step has several, the last one."""
    rows = _places(frame, groups(frame, (*PARAMETER, *AT)), (first, second))
    both = rows[:, (rows >= 0).all(axis=0)]
    return frame.iloc[both[0]], frame.iloc[both[1]]


def _places(frame: pd.DataFrame, ids: Ints, kinds: Sequence[str]) -> Ints:
    """Per kind and group the last row, -1 without one; shape ``(kinds, groups)``."""
    kind = np.asarray(frame["kind"].array)
    rows = np.full((len(kinds), int(ids.max(initial=-1)) + 1), -1)
    for own, name in zip(rows, kinds, strict=True):
        mine = np.flatnonzero(kind == name)
        own[ids[mine]] = mine
    return rows


def sums(ids: Ints, values: npt.ArrayLike) -> Floats:
    """The sum of each group of :func:`groups`, added in the order of the rows."""
    added: Floats = np.bincount(ids, np.asarray(values, np.float64)).astype(np.float64)
    return added


def largest(ids: Ints, values: npt.ArrayLike) -> Floats:
    """The largest value of each group of :func:`groups`; NaN where it has none."""
    found = np.full(int(ids.max(initial=-1)) + 1, np.nan)
    np.fmax.at(found, ids, np.asarray(values, np.float64))
    return found


def worst_rows(ids: Ints, values: npt.ArrayLike) -> Ints:
    """The row with the largest value of each group of :func:`groups`, the first of equals; NaN is smaller than all."""
    known = np.nan_to_num(np.asarray(values, np.float64), nan=-np.inf)
    order = np.lexsort((-np.arange(known.size), known, ids))
    rows: Ints = order[np.flatnonzero(np.diff(ids[order], append=-1))]
    return rows
