"""Rows of a frame that belong together, numbered in the order in which they appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.survey.rows import Key, text

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
#: Largest code of a combination of columns before codes are numbered anew.
_ROOM = 1 << 40


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by group.

    Attributes:
        number: of each row's group, shape ``(rows,)``; groups are numbered in the order of their first row.
        first: the first row of each group, shape ``(groups,)``.
    """

    number: Ints
    first: Ints

    @property
    def size(self) -> int:
        """How many groups there are."""
        return int(self.first.size)

    def add(self, values: npt.ArrayLike) -> Floats:
        """The sum over each group, added in the order of the rows; shape ``(groups,)``."""
        return np.bincount(self.number, np.asarray(values, np.float64), minlength=self.size).astype(np.float64)

    def count(self, rows: npt.ArrayLike) -> Ints:
        """How many rows of each group a mask holds, shape ``(groups,)``."""
        return self.add(rows).astype(np.int64)

    def largest(self, values: npt.ArrayLike) -> Floats:
        """The largest value of each group; NaN where it has none, shape ``(groups,)``."""
        found = np.full(self.size, np.nan)
        np.fmax.at(found, self.number, np.asarray(values, np.float64))
        return found

    def last(self) -> Ints:
        """The last row of each group, shape ``(groups,)``."""
        rows = np.zeros(self.size, np.int64)
        rows[self.number] = np.arange(self.number.size)
        return rows

    def worst(self, values: npt.ArrayLike) -> Ints:
        """The row with the largest value of each group, the first of equals; NaN counts as smallest."""
        known = np.nan_to_num(np.asarray(values, np.float64), nan=-np.inf)
        order = np.lexsort((-np.arange(known.size), known, self.number))
        rows: Ints = order[np.flatnonzero(np.diff(self.number[order], append=-1))]
        return rows

    def rows(self) -> list[Ints]:
        """The rows of each group, in their order."""
        order = np.argsort(self.number, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.number, minlength=self.size))[:-1]) if self.size else []


def group(frame: pd.DataFrame, names: Sequence[str]) -> Groups:
    """Group the rows of a frame by columns; missing values are equal to each other."""
    code = np.zeros(len(frame), np.int64)
    for name in names:
        column = frame[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            own = column.cat.codes.to_numpy().astype(np.int64) + 1
        else:
            own = pd.factorize(column, use_na_sentinel=False)[0].astype(np.int64)
        width = int(own.max(initial=0)) + 1
        if int(code.max(initial=0)) * width > _ROOM:
            code = pd.factorize(code)[0].astype(np.int64)
        code = code * width + own
    number = pd.factorize(code)[0].astype(np.int64)
    return Groups(number, np.unique(number, return_index=True)[1].astype(np.int64))


def taken(frame: pd.DataFrame, rows: Ints, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Some columns of some rows as tuples of Python values; a missing name is empty."""
    columns = []
    for name in names:
        values = frame[name].iloc[rows]
        named = isinstance(values.dtype, pd.CategoricalDtype)
        columns.append([text(v) for v in values] if named else values.tolist())
    return list(zip(*columns, strict=True))


def keys(frame: pd.DataFrame, rows: Ints) -> list[Key]:
    """The tensors that some rows of a frame are about."""
    return taken(frame, rows, ("root", "module", "kind", "name", "call"))
