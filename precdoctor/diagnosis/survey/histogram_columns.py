"""Columns of a log as arrays. A log may be hostile: impossible values are refused before anything is sized by them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.errors import CorruptRunError
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN


def magnitudes(frame: pd.DataFrame, column: str = "amax") -> npt.NDArray[np.float64]:
    """A column of magnitudes, shape ``(rows,)``; NaN for nulls, negative and non-finite values."""
    values = frame[column].to_numpy(dtype=np.float64, na_value=math.nan)
    with np.errstate(invalid="ignore"):
        return np.where((values >= 0.0) & (values < math.inf), values, math.nan)


def with_exponents(frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Mask of the rows that hold a histogram, shape ``(rows,)``."""
    held: npt.NDArray[np.bool_] = (frame["exp_hist"].notna() & frame["exp_lo"].notna()).to_numpy()
    return held


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
