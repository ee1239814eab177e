"""FP8 scaling recipes: the scale each step of a tensor would have had, and what the cast at that scale would have done.

A tensor is multiplied by ``scale`` before the cast. *Current* scaling takes it from the tensor itself, *delayed*
scaling from the amax of earlier steps, which costs no extra pass and goes stale when amax jumps. Both bring an amax to
the format's maximum: ``scale = max / amax / 2**margin``. Blocks have scales of their own and no history; see
:func:`precdoctor.numerics.block_prediction.predict_blocks`.

Two states of a history make a bad scale, and here neither does: an amax of 0 (``max / 0`` is Inf, and with an epsilon
in its place the next non-zero tensor saturates) and one that is not finite (it poisons the history for as long as it
stays in it). Such entries are left out; with none left the scale stays what it was, 1 at the start.

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
    """Which amax of the history counts."""

    MAX = "max"
    MOST_RECENT = "recent"


@dataclass(frozen=True)
class CurrentScaling:
    """The scale of each step follows from the tensor itself.

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
        amax: the largest of them, or the last one.
        margin: binades to stay below the format's maximum.

    Raises:
        ValueError: a history without a step.
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
    """The amax of one tensor over the steps that were recorded.

    Attributes:
        steps: increasing, shape ``(n,)``.
        amax: over finite elements; 0 when all are zero, NaN when there is none; shape ``(n,)``.
        non_finite: whether the tensor also held a NaN or Inf, so that an amax taken on the device was none.
    """

    steps: Ints
    amax: Floats
    non_finite: Bools

    @classmethod
    def of(cls, amax: Sequence[float | None] | Floats, steps: Sequence[int] | Ints | None = None) -> AmaxSeries:
        """From plain numbers, one per step; None, NaN and Inf are non-finite entries.

        Raises:
            ValueError: the steps do not increase, or are not as many.
        """
        values = np.asarray(amax, dtype=np.float64)  # None becomes NaN
        at = np.arange(values.size) if steps is None else np.asarray(steps, dtype=np.int64)
        if at.shape != values.shape or (np.diff(at) <= 0).any():
            raise ValueError("an amax series has one increasing step per amax")
        bad = ~np.isfinite(values)
        return cls(at.astype(np.int64), np.where(bad, math.nan, values), bad)

    @property
    def usable(self) -> Bools:
        """Entries a scale can follow from: finite and not zero."""
        usable: Bools = (self.amax > 0.0) & ~self.non_finite
        return usable


@dataclass(frozen=True, eq=False)
class ScaleSeries:
    """The scale of every recorded step; all arrays have shape ``(n,)``.

    Attributes:
        scale: the multiplier in front of the cast.
        kept: nothing usable to derive it from: the scale before it was kept.
        cold: there was none before either, so that it is 1: the first step of a delayed recipe.
        non_finite: a NaN or Inf lies in the window; here it is left out, elsewhere it would decide.
        sparse: the window holds no recorded step, so the last one before it stands in.
    """

    scale: Floats
    kept: Bools
    cold: Bools
    non_finite: Bools
    sparse: Bools


def scale_series(series: AmaxSeries, fmt: Format, recipe: Recipe) -> ScaleSeries:
    """The scale each recorded step would have had.

    Between samples amax is not known: a history of K steps holds the samples among them, and never less than the one
    before, so a log sampled every N steps shows scales up to N steps staler than the run's own.

    Args:
        series: of the tensor.
        fmt: what is cast to.
        recipe: current or delayed.
    """
    n = series.steps.size
    usable = series.usable
    amax = np.where(usable, series.amax, 0.0)
    if isinstance(recipe, CurrentScaling):
        first, last = np.arange(n), np.arange(n) + 1
        sparse = np.zeros(n, dtype=np.bool_)
    else:
        within = np.searchsorted(series.steps, series.steps - recipe.history)
        last = np.arange(n)
        sparse = (within == last) & (last > 0)
        first = np.maximum(np.minimum(within, last - 1), 0)
    if isinstance(recipe, DelayedScaling) and recipe.amax is Amax.MOST_RECENT:
        newest = np.maximum.accumulate(np.where(usable, np.arange(n), -1)) if n else np.zeros(0, dtype=np.int64)
        before = np.concatenate([[-1], newest[:-1]]) if n else newest
        largest = np.where(before >= first, amax[np.maximum(before, 0)] if n else amax, 0.0)
    else:
        largest = _window_max(amax, first, last)
    scale = _scale_of(largest, fmt, recipe.margin)
    kept = largest == 0.0
    bad = _window_max(series.non_finite.astype(np.float64), first, last) > 0.0
    cold = np.logical_and.accumulate(kept) if n else kept
    return ScaleSeries(_filled(scale, kept), kept, cold, bad, sparse)


def _scale_of(amax: Floats, fmt: Format, margin: int) -> Floats:
    """``max / amax / 2**margin``, at most FP32's largest number; 1 where amax is 0."""
    with np.errstate(over="ignore"):
        scale = fmt.max / np.where(amax > 0.0, amax, fmt.max) / 2.0**margin
    return np.where(amax > 0.0, np.clip(scale, FP32.min_subnormal, FP32.max), 1.0)


def _filled(scale: Floats, kept: Bools) -> Floats:
    """Where ``kept``, the last scale before that was not; 1 before the first one."""
    at = np.maximum.accumulate(np.where(kept, -1, np.arange(scale.size))) if scale.size else np.zeros(0, dtype=np.int64)
    return np.where(at < 0, 1.0, scale[np.maximum(at, 0)])


def _window_max(values: Floats, first: Ints, last: Ints) -> Floats:
    """``max(values[first:last])`` for every pair, 0 for an empty one; ``values`` are not negative.

    From maxima over stretches of 1, 2, 4 ... elements, two of which cover any window.
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
    """``log2(max / (amax * scale))``; NaN where amax is 0 or NaN."""
    known = amax > 0.0
    logs = np.log2(np.where(known, amax, 1.0)) + np.log2(scale)
    return np.where(known, math.log2(fmt.max) - logs, math.nan)
