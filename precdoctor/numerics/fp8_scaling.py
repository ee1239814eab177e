"""FP8 scaling recipes: the scale that each step of a tensor would have had.

A tensor is multiplied by ``scale`` before the cast. *Current* scaling derives it from the tensor itself, *delayed*
scaling from the amax of earlier steps, which costs no extra pass and goes stale when amax jumps. Both bring an amax to
the format's maximum: ``scale = max / amax / 2**margin``. Blocks have scales of their own and no history; see
:func:`precdoctor.numerics.block_prediction.predict_blocks`.

Two kinds of history entry would make a bad scale: an amax of 0 (``max / 0`` is Inf, and with an epsilon instead of 0
the next non-zero tensor saturates) and a non-finite one (it poisons the scale for as long as it is in the history).
Both are left out here. If no entry remains, the previous scale is kept; the first scale is 1.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3; Transformer Engine,
``DelayedScaling`` (margin, amax_history_len, amax_compute_algo).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.formats import FP32, Format


class Amax(enum.Enum):
    """Which amax of the history determines the scale."""

    MAX = "max"
    MOST_RECENT = "recent"


@dataclass(frozen=True)
class CurrentScaling:
    """The scale of each step follows from the amax of the tensor at that step.

    Attributes:
        margin: binades to stay below the format's maximum.
    """

    margin: int = 0

    def __str__(self) -> str:
        return "current" + (f":{self.margin}" if self.margin else "")


@dataclass(frozen=True)
class DelayedScaling:
    """The scale of each step follows from the amax of the ``history`` steps before it.

    Attributes:
        history: how many steps back; Transformer Engine's default is 1024.
        amax: whether the largest or the most recent amax of the history counts.
        margin: binades to stay below the format's maximum.

    Raises:
        ValueError: ``history`` is below 1.
    """

    history: int = 1024
    amax: Amax = Amax.MAX
    margin: int = 0

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"an amax history has at least 1 step, not {self.history!r}")

    def __str__(self) -> str:
        return f"delayed:{self.history}:{self.amax.value}" + (f":{self.margin}" if self.margin else "")


Recipe = CurrentScaling | DelayedScaling


@dataclass(frozen=True, eq=False)
class AmaxSeries:
    """The amax of one tensor over the recorded steps.

    Attributes:
        steps: increasing, shape ``(n,)``.
        amax: over finite elements; 0 if all are zero, NaN if no element is finite; shape ``(n,)``.
        non_finite: whether the tensor also held a NaN or Inf, so that an amax over all of its elements is not finite.
    """

    steps: Ints
    amax: Floats
    non_finite: Bools

    @classmethod
    def of(cls, amax: Sequence[float | None] | Floats, steps: Sequence[int] | Ints | None = None) -> AmaxSeries:
        """Build a series from plain numbers, one per step; None, NaN and Inf become non-finite entries.

        Raises:
            ValueError: the steps do not increase, or their number differs from that of the amaxes.
        """
        values = np.asarray(amax, dtype=np.float64)  # None becomes NaN
        at = np.arange(values.size) if steps is None else np.asarray(steps, dtype=np.int64)
        if at.shape != values.shape or (np.diff(at) <= 0).any():
            raise ValueError("an amax series has one increasing step per amax")
        bad = ~np.isfinite(values)
        return cls(at.astype(np.int64), np.where(bad, math.nan, values), bad)

    @property
    def usable(self) -> Bools:
        """Mask of the entries that a scale can be derived from: finite and not zero."""
        return (self.amax > 0.0) & ~self.non_finite


@dataclass(frozen=True, eq=False)
class ScaleSeries:
    """The scale of every recorded step; all arrays have shape ``(n,)``.

    Attributes:
        scale: the multiplier before the cast.
        kept: whether the window held no usable amax, so that the previous scale was kept.
        cold: whether there was no previous scale either, so that it is 1: the first step of a delayed recipe.
        non_finite: whether a NaN or Inf lies in the window. It is left out here; other implementations would use it.
        sparse: whether the window holds no recorded step, so that the last one before the window is used instead.
    """

    scale: Floats
    kept: Bools
    cold: Bools
    non_finite: Bools
    sparse: Bools


def scale_series(series: AmaxSeries, fmt: Format, recipe: Recipe) -> ScaleSeries:
    """Return the scale that each recorded step would have had.

    The amax between samples is unknown: a history of K steps uses the samples among them, and at least the last sample
    before. So a log sampled every N steps shows scales up to N steps staler than those of the run.

    """
    usable = series.usable
    amax = np.where(usable, series.amax, 0.0)
    at = np.arange(amax.size)
    if isinstance(recipe, CurrentScaling):
        first, last, sparse = at, at + 1, np.zeros(at.shape, dtype=np.bool_)
    else:
        within = np.searchsorted(series.steps, series.steps - recipe.history)
        first, last, sparse = np.maximum(np.minimum(within, at - 1), 0), at, (within == at) & (at > 0)
    if isinstance(recipe, DelayedScaling) and recipe.amax is Amax.MOST_RECENT:
        newest = np.r_[-1, np.maximum.accumulate(np.where(usable, at, -1))][:-1]
        largest = np.where(newest >= first, amax[np.maximum(newest, 0)], 0.0)
    else:
        largest = _window_max(amax, first, last)
    scale = _scale_of(largest, fmt, recipe.margin)
    kept = largest == 0.0
    bad = _window_max(series.non_finite.astype(np.float64), first, last) > 0.0
    cold = np.logical_and.accumulate(kept)
    return ScaleSeries(_filled(scale, kept), kept, cold, bad, sparse)


def _scale_of(amax: Floats, fmt: Format, margin: int) -> Floats:
    """Return ``max / amax / 2**margin``, clamped to FP32's positive numbers; 1 for an amax of 0."""
    with np.errstate(over="ignore"):
        scale = fmt.max / np.where(amax > 0.0, amax, fmt.max) / 2.0**margin
    return np.where(amax > 0.0, np.clip(scale, FP32.min_subnormal, FP32.max), 1.0)


def _filled(scale: Floats, kept: Bools) -> Floats:
    """Replace the scales marked ``kept`` by the last scale before them that is not marked; by 1 if there is none."""
    at = np.maximum.accumulate(np.where(kept, -1, np.arange(scale.size)))
    return np.where(at < 0, 1.0, scale[np.maximum(at, 0)])


def _window_max(values: Floats, first: Ints, last: Ints) -> Floats:
    """Return ``max(values[first:last])`` for every pair, 0 for an empty window; ``values`` must not be negative.

    Built from maxima over stretches of 1, 2, 4 ... elements, two of which cover any window.
    """
    length = last - first
    out = np.zeros(values.size)
    table = values
    for level in range(max(int(length.max(initial=0)).bit_length(), 1)):
        span = 1 << level
        at = (length >= span) & (length < 2 * span)
        out[at] = np.maximum(table[first[at]], table[last[at] - span])
        if table.size > span:
            table = np.maximum(table[:-span], table[span:])
    return out


def headroom_binades(amax: Floats, scale: Floats, fmt: Format) -> Floats:
    """Return ``log2(max / (amax * scale))``; NaN if amax is 0 or NaN."""
    known = amax > 0.0
    logs = np.log2(np.where(known, amax, 1.0)) + np.log2(scale)
    return np.where(known, math.log2(fmt.max) - logs, math.nan)
