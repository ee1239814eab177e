"""Trends of the largest elements over the steps: lines through log2(amax) and log2(amax / geometric mean)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from precdoctor.numerics.arrays import Floats, Ints

_T = TypeVar("_T", np.int64, np.float64)


def grown(array: npt.NDArray[_T], size: int, fill: float = 0.0) -> npt.NDArray[_T]:
    """Extend the last axis of an array to ``size`` by entries of ``fill``."""
    added = np.full((*array.shape[:-1], size - array.shape[-1]), fill, dtype=array.dtype)
    return np.concatenate([array, added], axis=-1)


class Trends:
    """Least-squares lines of each tensor from running sums: rows in any order, constant memory per tensor."""

    def __init__(self) -> None:
        #: Sums of 1, t and t^2, then of y and t*y for each of the two series; shape ``(7, tensors)``.
        self._sums = np.zeros((7, 0))
        self._origin: int | None = None

    def grow(self, tensors: int) -> None:
        self._sums = grown(self._sums, tensors)

    def add(self, ids: Ints, steps: Ints, amax: Floats, typical: Floats) -> None:
        """Add rows; those without a non-zero element are skipped.

        Args:
            ids: number of each row's tensor.
            amax: without the loss scale; NaN or 0 without a non-zero element.
            typical: geometric mean of the non-zero magnitudes; likewise.
        """
        if not ids.size:
            return
        if self._origin is None:
            self._origin = int(steps[0])
        known = (amax > 0.0) & (typical > 0.0) & np.isfinite(amax) & np.isfinite(typical)
        ids, t = ids[known], (steps[known] - self._origin).astype(np.float64)
        peak, crest = np.log2(amax[known]), np.log2(amax[known]) - np.log2(typical[known])
        for row, values in zip(self._sums, (np.ones_like(t), t, t * t, peak, t * peak, crest, t * crest), strict=True):
            np.add.at(row, ids, values)

    def slopes(self, tensor: int) -> tuple[float, float]:
        """Return the slopes of amax and of amax over the geometric mean, in binades per step; 0 below three rows."""
        n, t, tt, peak, t_peak, crest, t_crest = self._sums[:, tensor].tolist()
        spread = n * tt - t * t
        if n < 3 or spread <= 0.0:
            return 0.0, 0.0
        return (n * t_peak - t * peak) / spread, (n * t_crest - t * crest) / spread
