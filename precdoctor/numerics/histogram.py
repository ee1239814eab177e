"""The exponent histogram: one small row per tensor that predicts a cast to any format at any scale.

Bin ``k`` counts the magnitudes in ``(2**k, 2**(k+1)]``. The closed upper end makes the count of elements "flushed to
zero under round-to-nearest-even" exact at power-of-two scales: a format flushes exactly the magnitudes up to and
including half its smallest subnormal, a power of two, ties included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.formats import Format

#: Bins reach from 2**EXP_MIN to 2**(EXP_MAX + 1). FP32's smallest subnormal, 2**-149, closes bin -150. Only FP64 has
#: magnitudes outside; the end bins count them.
EXP_MIN = -160
EXP_MAX = 160


@dataclass(frozen=True)
class Interval:
    """A count or fraction known to lie in ``[low, high]``; exact when the two are equal."""

    low: float
    high: float


def bin_of(magnitude: float) -> int:
    """The bin of one finite positive magnitude: ``k`` with ``2**k < magnitude <= 2**(k+1)``, clamped to the end bins.

    Raises:
        ValueError: the magnitude is zero, negative or not finite.
    """
    if not 0.0 < magnitude < math.inf:
        raise ValueError(f"a bin needs a finite positive magnitude, got {magnitude!r}")
    mantissa, exponent = math.frexp(magnitude)  # magnitude = mantissa * 2**exponent, 0.5 <= mantissa < 1
    k = exponent - 2 if mantissa == 0.5 else exponent - 1
    return min(max(k, EXP_MIN), EXP_MAX)


def bins_of(magnitudes: Floats) -> Ints:
    """:func:`bin_of` for an array of any shape; signs are ignored, zeros get the lowest bin.

    The caller must have removed NaN and Inf.
    """
    mantissa, exponent = np.frexp(np.abs(magnitudes))
    bins = np.where(mantissa == 0.5, exponent - 2, exponent - 1).astype(np.int64)
    return np.where(magnitudes == 0.0, EXP_MIN, np.clip(bins, EXP_MIN, EXP_MAX))


@dataclass(frozen=True, eq=False)
class ExponentHistogram:
    """Counts of finite non-zero magnitudes by binary exponent.

    Attributes:
        lo: bin number of ``counts[0]``.
        counts: int64, shape ``(bins,)``; ``counts[i]`` belongs to bin ``lo + i``. May be empty.
    """

    lo: int
    counts: Ints

    @classmethod
    def of(cls, lo: int | None, counts: Sequence[int] | Ints | None) -> ExponentHistogram:
        """Build a histogram from the two columns of the log; None or empty columns give the empty histogram."""
        if lo is None or counts is None or len(counts) == 0:
            return cls(0, np.zeros(0, dtype=np.int64))
        return cls(int(lo), np.asarray(counts, dtype=np.int64))

    @property
    def total(self) -> int:
        """Number of elements counted."""
        return int(self.counts.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        a, b = self.trimmed(), other.trimmed()
        return a.lo == b.lo and np.array_equal(a.counts, b.counts)

    def __hash__(self) -> int:
        t = self.trimmed()
        return hash((t.lo, t.counts.tobytes()))

    def trimmed(self) -> ExponentHistogram:
        """Return the same counts without empty bins at either end; an empty histogram becomes ``(0, [])``."""
        used = np.flatnonzero(self.counts)
        if used.size == 0:
            return ExponentHistogram(0, np.zeros(0, dtype=np.int64))
        first, last = int(used[0]), int(used[-1])
        return ExponentHistogram(self.lo + first, self.counts[first : last + 1])

    def merge(self, other: ExponentHistogram) -> ExponentHistogram:
        """Return the sum of both histograms: integers, so exact in any order."""
        a, b = self.trimmed(), other.trimmed()
        if a.counts.size == 0:
            return b
        if b.counts.size == 0:
            return a
        lo = min(a.lo, b.lo)
        hi = max(a.lo + a.counts.size, b.lo + b.counts.size)
        out = np.zeros(hi - lo, dtype=np.int64)
        out[a.lo - lo : a.lo - lo + a.counts.size] += a.counts
        out[b.lo - lo : b.lo - lo + b.counts.size] += b.counts
        return ExponentHistogram(lo, out)

    def shift(self, scale: float) -> ExponentHistogram:
        """Return the histogram of the same elements times ``scale``, a power of two: exact, ties included.

        Elements that leave ``[EXP_MIN, EXP_MAX]`` are counted in the end bins.

        Raises:
            ValueError: ``scale`` is not a finite power of two; or an end bin holds elements and would have to move
                inwards, although their magnitudes may lie anywhere beyond that end.
        """
        if not 0.0 < scale < math.inf or math.frexp(scale)[0] != 0.5:
            raise ValueError(f"a histogram is shifted by a finite power of two, got {scale!r}")
        by = math.frexp(scale)[1] - 1
        t = self.trimmed()
        if by == 0 or t.counts.size == 0:
            return t
        bins = np.arange(t.lo, t.lo + t.counts.size)
        inwards = EXP_MIN if by > 0 else EXP_MAX
        if t.counts[bins == inwards].any():
            raise ValueError("the histogram holds magnitudes beyond its end bin, whose scaled exponents are not known")
        moved = np.clip(bins + by, EXP_MIN, EXP_MAX)
        lo = int(moved[0])
        counts = np.zeros(int(moved[-1]) - lo + 1, dtype=np.int64)
        np.add.at(counts, moved - lo, t.counts)
        return ExponentHistogram(lo, counts)

    def __getitem__(self, bins: slice) -> ExponentHistogram:
        """``histogram[a:b]``: the elements of bins ``a`` to ``b - 1``; either bound may be omitted.

        Raises:
            TypeError: ``bins`` is not a slice, or has a step.
        """
        if getattr(bins, "step", 1) is not None:
            raise TypeError("a histogram is cut with histogram[a:b]; the ends are bins")
        end = self.lo + self.counts.size
        first = self.lo if bins.start is None else min(max(bins.start, self.lo), end)
        last = end if bins.stop is None else min(max(bins.stop, first), end)
        return ExponentHistogram(first, self.counts[first - self.lo : last - self.lo]).trimmed()

    def at_most(self, limit: float) -> Interval:
        """Count the magnitudes ``<= limit``. Exact at a power of two; elsewhere and in end bins, that bin is in doubt.

        Raises:
            ValueError: ``limit`` is NaN.
        """
        if math.isnan(limit):
            raise ValueError("the limit of a histogram query cannot be NaN")
        if limit <= 0.0 or self.counts.size == 0:
            return Interval(0.0, 0.0)
        if math.isinf(limit):
            return Interval(float(self.total), float(self.total))
        k = bin_of(limit)
        closed = math.frexp(limit)[0] == 0.5 and EXP_MIN < k < EXP_MAX  # the limit is the closed end of bin k
        below = int(self.counts[: max(0, k - self.lo)].sum())
        inside = int(self.counts[k - self.lo]) if 0 <= k - self.lo < self.counts.size else 0
        return Interval(float(below + (inside if closed else 0)), float(below + inside))

    def flushed(self, fmt: Format, scale: float = 1.0) -> Interval:
        """Count the elements that become zero when multiplied by ``scale`` and rounded to nearest in ``fmt``.

        Exact at power-of-two scales, ties included.

        Raises:
            ValueError: ``scale`` is not finite and positive.
        """
        if not 0.0 < scale < math.inf:
            raise ValueError(f"a scale is a finite positive number, got {scale!r}")
        return self.at_most(fmt.flush_limit / scale)


@dataclass(frozen=True, eq=False)
class Histograms:
    """Exponent histograms of many tensors in flat arrays, one histogram after the other.

    Attributes:
        lo: bin of each tensor's first count, shape ``(tensors,)``; any number for a tensor without counts.
        lengths: number of counts of each tensor, shape ``(tensors,)``.
        counts: int64, the counts of all tensors, shape ``(lengths.sum(),)``.
    """

    lo: Ints
    lengths: Ints
    counts: Ints

    @classmethod
    def of(cls, histograms: Sequence[ExponentHistogram]) -> Histograms:
        """Concatenate single histograms."""
        counts = [h.counts for h in histograms]
        lengths = np.array([c.size for c in counts], dtype=np.int64)
        lo = np.array([h.lo for h in histograms], dtype=np.int64)
        return cls(lo, lengths, np.concatenate([np.zeros(0, np.int64), *counts]))

    @cached_property
    def whose(self) -> Ints:
        """Index of the tensor that each count belongs to, shape of ``counts``."""
        return np.repeat(np.arange(self.lengths.size), self.lengths)

    @cached_property
    def bins(self) -> Ints:
        """Bin number of each count, shape of ``counts``."""
        return np.arange(self.counts.size) + np.repeat(self.lo - self._starts, self.lengths)

    @cached_property
    def preceding(self) -> Ints:
        """Number of elements of the same tensor in lower bins, shape of ``counts``."""
        return self._running[:-1] - np.repeat(self._running[self._starts], self.lengths)

    @cached_property
    def total(self) -> Ints:
        """Number of elements of each tensor, shape ``(tensors,)``."""
        return self.below(EXP_MAX + 1)

    @cached_property
    def _starts(self) -> Ints:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def _running(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def row(self, tensor: int) -> ExponentHistogram:
        """Return the histogram of one tensor; an empty one for a tensor without counts."""
        start, length = int(self._starts[tensor]), int(self.lengths[tensor])
        return ExponentHistogram.of(int(self.lo[tensor]), self.counts[start : start + length])

    def taken(self, tensors: Ints) -> Histograms:
        """Select histograms by index of the tensor."""
        lengths = self.lengths[tensors]
        at = np.arange(int(lengths.sum())) + np.repeat(self._starts[tensors] - np.cumsum(lengths) + lengths, lengths)
        return Histograms(self.lo[tensors], lengths, self.counts[at])

    def below(self, bins: Ints | int) -> Ints:
        """Count each tensor's elements in bins lower than ``bins``, a number or an array with one number per tensor."""
        ends = self._starts + np.clip(bins - self.lo, 0, self.lengths)
        return self._running[ends] - self._running[self._starts]

    def at_most(self, limit: Floats) -> tuple[Ints, Ints]:
        """Lower and upper counts of :meth:`ExponentHistogram.at_most` per tensor; all shapes are ``(tensors,)``."""
        finite = np.where(limit > 0.0, np.minimum(limit, np.finfo(np.float64).max), 1.0)
        k = bins_of(finite)
        closed = (np.frexp(finite)[0] == 0.5) & (k > EXP_MIN) & (k < EXP_MAX)
        low, high = (np.where(np.isinf(limit), self.total, self.below(end)) for end in (k + closed, k + 1))
        return np.where(limit > 0.0, low, 0), np.where(limit > 0.0, high, 0)

    def positions(self, share: float) -> Floats:
        """log2 of the magnitude that ``share`` of each tensor's elements lie below, shape ``(tensors,)``.

        Elements are spread evenly over log2 in their bin. No tensor may be empty.
        """
        wanted = share * self.total
        before = self._running[self._starts]
        at = np.searchsorted(self._running, before + np.maximum(wanted, 1e-9)) - 1  # the first bin that reaches it
        return self.bins[at] + (wanted - self.preceding[at]) / self.counts[at]

    def window(self, first: int, size: int) -> Ints:
        """Return the counts of bins ``first .. first + size - 1``, shape ``(tensors, size)``; 0 for absent bins."""
        out = np.zeros((self.lengths.size, size), dtype=np.int64)
        inside = (self.bins >= first) & (self.bins < first + size)
        out[self.whose[inside], self.bins[inside] - first] = self.counts[inside]
        return out

    def sums(self, values: Floats) -> Floats:
        """Sum ``counts * values`` over each tensor, shape ``(tensors,)``; ``values`` has one entry per count."""
        return np.bincount(self.whose, self.counts * values, minlength=self.lengths.size).astype(np.float64)

    def merged(self, group: Ints, groups: int) -> Histograms:
        """Add up the tensors of each group and trim empty bins; ``group``: group of each, shape ``(tensors,)``."""
        used = self.counts > 0
        whose, bins = group[self.whose[used]], self.bins[used]
        lo, end = np.full(groups, EXP_MAX + 1), np.full(groups, EXP_MIN)
        np.minimum.at(lo, whose, bins)
        np.maximum.at(end, whose, bins + 1)
        lengths = np.maximum(end - lo, 0)
        at = (np.cumsum(lengths) - lengths)[whose] + bins - lo[whose]
        counts = np.zeros(int(lengths.sum()), dtype=np.int64)
        np.add.at(counts, at, self.counts[used])
        return Histograms(np.where(lengths > 0, lo, 0), lengths, counts)
