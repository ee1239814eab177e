"""Estimate of how many of a tensor's zeros were rounded to zero, as opposed to zero from the start.

A tensor already in a narrow format shows its zeros and the exponents of the surviving elements. Underflow leaves a
mark: the histogram runs into the flush limit with mass in its lowest bins, and the flushed elements continue it.
Structural zeros (ReLU, dropout, padding) leave none. So a family of distributions is fitted by likelihood to the
survivors near the limit, with the rounding to whole subnormal steps computed exactly, and the fit says how much lies
below. The family: Gaussians with a log-normal scale (channels of unequal size) of widths 0 to 3, log-normals of widths
1/2 to 5, Laplace, Student with 1 to 9 degrees of freedom; each at scales a quarter of a binade apart. Densities with a
peak at zero (products of random variables) are left out and underestimated: with them, other tensors would be
overestimated by as much, and a false alarm is the worse error. The estimate never exceeds the number of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram, Histograms

#: Number of bins above the flush limit that the fit uses: enough for a Gaussian to show its shoulder.
MATCHED_BINS = 10
#: Number of bins estimated below the limit; a bounded density holds under 1e-7 of its near mass beyond them.
_REACH = 32
#: With fewer surviving elements in the fitted bins, or none in the two lowest, the estimate is 0: the shape is unknown.
_MIN_COUNT = 32
#: Real tensors follow no member of the family exactly. Larger counts would single out the member whose misfit lies in
#: the emptiest bins; capped at this count, all members that fit about as well contribute.
_TRUSTED_COUNT = 3000.0
#: Scales of the family, in binades relative to the smallest subnormal.
_SCALES = np.arange(-4.0, 28.0, 0.25)
#: Standard deviations of the natural logarithm.
_MIXTURE_WIDTHS = np.arange(0.0, 3.01, 0.25)
_LOG_NORMAL_WIDTHS = np.arange(0.5, 5.01, 0.25)
_FREEDOMS = (1, 3, 5, 9)

#: Number of tensors fitted together: bounds the memory, 30 kB each.
_AT_ONCE = 512

_Shape = Callable[[Floats], Floats]


@dataclass(frozen=True, eq=False)
class Tail:
    """Estimated counts of the elements of one tensor that were rounded to zero.

    Attributes:
        lo: bin of ``counts[0]``.
        counts: estimated elements per bin; the last entry is the bin that ends at the flush limit.
    """

    lo: int
    counts: Floats

    @property
    def total(self) -> float:
        """Estimated number of elements that were rounded to zero."""
        return float(self.counts.sum())

    def still_flushed(self, fmt: Format, scale: float) -> float:
        """Estimate how many would be flushed again if the tensor were first multiplied by ``scale``; in whole bins."""
        top = math.floor(math.log2(fmt.flush_limit / scale))  # bins below this one are flushed
        return float(self.counts[: max(0, min(self.counts.size, top - self.lo))].sum())


@dataclass(frozen=True, eq=False)
class Tails:
    """Estimated counts of many tensors, as in :class:`Tail`; ``counts`` has the shape ``(tensors, bins)``."""

    lo: int
    counts: Floats

    @property
    def total(self) -> Floats:
        """Estimated number of elements of each tensor that were rounded to zero."""
        return self.counts.sum(axis=1)

    @property
    def mass(self) -> Floats:
        """Estimated sum of the magnitudes of those elements, each taken at the middle of its bin."""
        return (self.counts * _middles(self.lo, self.counts.shape[1])).sum(axis=1)


def flushed_tail(histogram: ExponentHistogram, zeros: int, fmt: Format) -> Tail:
    """Estimate how many of ``zeros`` rounding to ``fmt`` made, bin by bin below its flush limit.

    ``histogram``: exponents of the surviving elements, as stored in ``fmt``.
    """
    tails = flushed_tails(Histograms.of([histogram]), np.array([zeros]), fmt)
    return Tail(tails.lo, tails.counts[0])


def flushed_tails(histograms: Histograms, zeros: Ints, fmt: Format) -> Tails:
    """:func:`flushed_tail` for many tensors; ``zeros`` has the shape ``(tensors,)``."""
    limit = round(math.log2(fmt.flush_limit))  # bin limit - 1 ends at the flush limit
    survivors = histograms.window(limit, MATCHED_BINS)
    near = np.flatnonzero((zeros > 0) & (survivors.sum(axis=1) >= _MIN_COUNT) & (survivors[:, :2].sum(axis=1) > 0))
    counts = np.zeros((zeros.size, _REACH))
    for rows in np.split(near, np.arange(_AT_ONCE, near.size, _AT_ONCE)):
        counts[rows] = _fitted(survivors[rows], zeros[rows])
    return Tails(limit - _REACH, counts)


def _fitted(survivors: Ints, zeros: Ints) -> Floats:
    """Fit the family to ``survivors`` above the limit; return counts below it, shape ``(tensors, _REACH)``."""
    family = _family()
    seen = survivors.sum(axis=1, dtype=np.float64)
    likelihood = survivors @ family.log_shares * np.minimum(1.0, _TRUSTED_COUNT / seen)[:, None]
    weight = np.exp(likelihood - likelihood.max(axis=1, keepdims=True))
    # Weighted by share, because a member that hides most of its mass is less likely; the median ignores a few members
    # that fit by chance.
    cumulative = np.cumsum(weight * family.share, axis=1)
    chosen = (cumulative < 0.5 * cumulative[:, -1:]).sum(axis=1)
    counts: Floats = family.below[chosen] / family.share[chosen, None] * seen[:, None]
    total = counts.sum(axis=1)
    counts *= np.where(total > zeros, zeros / np.maximum(total, 1.0), 1.0)[:, None]
    return counts


def masses(histogram: ExponentHistogram) -> Floats:
    """Estimate the sum of the magnitudes in each bin, each taken at the middle of the bin."""
    return histogram.counts * _middles(histogram.lo, histogram.counts.size)


def magnitude(histogram: ExponentHistogram) -> float:
    """Estimate the sum of the magnitudes in a histogram."""
    return float(masses(histogram).sum())


def magnitudes(histograms: Histograms) -> Floats:
    """:func:`magnitude` of many tensors, shape ``(tensors,)``."""
    return histograms.sums(1.5 * np.exp2(histograms.bins.astype(np.float64)))


def _middles(lo: int, size: int) -> Floats:
    return 1.5 * np.exp2(np.arange(lo, lo + size, dtype=np.float64))


@lru_cache(maxsize=1)
def _log_grid() -> tuple[Floats, Floats]:
    """``log2 x`` from -60 to 60 and ``log2 P(|X| < x)`` of a Gaussian there, close enough for linear interpolation."""
    x = np.arange(-60.0, 60.0, 1.0 / 32.0)
    return x, np.log2([math.erf(v) for v in np.exp2(x) / math.sqrt(2.0)])


def _gaussian(x: Floats) -> Floats:
    """``P(|X| < x)`` of a standard Gaussian."""
    return np.exp2(np.interp(np.log2(np.maximum(x, 2.0**-60)), *_log_grid())) * (x > 0.0)


def _normal_quantiles(count: int) -> Floats:
    """The middles of ``count`` equally likely slices of a Gaussian, by inverting :func:`_log_grid`."""
    share = (np.arange(count // 2) + 0.5) / (count / 2)
    x, below = _log_grid()
    positive = np.exp2(np.interp(np.log2(share), below, x))
    return np.concatenate([-positive[::-1], positive])


def _mixture(scales: Floats) -> _Shape:
    """``P(|X| < x)`` of a Gaussian whose scale is equally likely to be any of ``scales``."""
    return lambda x: np.mean([_gaussian(x / scale) for scale in scales], axis=0)


def _log_normal(width: float) -> _Shape:
    """``P(|X| < x)`` of a log-normal with median 1 and standard deviation ``width`` of the natural logarithm."""

    def share_below(x: Floats) -> Floats:
        z = np.log(np.maximum(x, 1e-300)) / width
        return 0.5 + 0.5 * np.sign(z) * _gaussian(np.abs(z))

    return share_below


def _student(freedom: int) -> _Shape:
    """``P(|X| < x)`` of Student's distribution, odd number of degrees of freedom (Abramowitz and Stegun, 26.7.3)."""

    def share_below(x: Floats) -> Floats:
        angle = np.arctan(x / math.sqrt(freedom))
        term, total = np.cos(angle), np.zeros_like(angle)
        for k in range(1, freedom - 1, 2):
            total += term
            term = term * np.cos(angle) ** 2 * (k + 1) / (k + 2)
        return np.asarray((angle + np.sin(angle) * total) * (2.0 / math.pi))

    return share_below


def _shapes() -> list[_Shape]:
    """``x -> P(|X| < x)`` of each member of the family at scale 1."""
    quantiles = _normal_quantiles(32)
    return [
        *(_mixture(np.exp(width * quantiles)) if width else _gaussian for width in _MIXTURE_WIDTHS),
        *(_log_normal(width) for width in _LOG_NORMAL_WIDTHS),
        *(_student(freedom) for freedom in _FREEDOMS),
        lambda x: x / np.sqrt(2.0 + x * x),  # Student with 2 degrees of freedom
        lambda x: -np.expm1(-x),
    ]


@dataclass(frozen=True, eq=False)
class _Family:
    """The members, sorted by hidden over visible probability, ascending; unit: subnormal steps.

    Attributes:
        log_shares: natural logarithms of the probabilities of the fitted bins as *stored*, given that an element is in
            one of them; shape ``(MATCHED_BINS, members)``.
        share: probability of all fitted bins together, shape ``(members,)``.
        below: probabilities of the bins below the limit, shape ``(members, _REACH)``.
    """

    log_shares: Floats
    share: Floats
    below: Floats


@lru_cache(maxsize=1)
def _family() -> _Family:
    """Return all members with a visible part.

    A stored value of n steps was anywhere within half a step of it, so with bin i holding ``2**(i-1) .. 2**i`` steps
    the edges are half a step up: 0.5, 1.5, 2.5, 4.5, 8.5 ...
    """
    edges = np.r_[0.5, np.exp2(np.arange(0, MATCHED_BINS)) + 0.5]
    lower = np.r_[0.0, np.exp2(np.arange(-_REACH, 0))]
    scales = np.exp2(_SCALES)[:, None]
    shapes = _shapes()
    visible = np.concatenate([np.diff(shape(edges[None, :] / scales), axis=1) for shape in shapes])
    below = np.concatenate([np.diff(shape(lower[None, :] / scales), axis=1) for shape in shapes])
    usable = visible.sum(axis=1) > 1e-9
    # A bin that has probability 0 in a member must not exclude the member because of one stray element.
    visible, below = np.maximum(visible[usable], 1e-12), below[usable]
    share = visible.sum(axis=1)
    order = np.argsort(below.sum(axis=1) / share)
    logs = np.log(visible / share[:, None])
    return _Family(np.ascontiguousarray(logs[order].T), share[order], below[order])
