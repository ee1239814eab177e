"""Facts of one training step about loss scales that it did not run with: where it overflows, and how much it flushes.

Gradients are linear in the loss scale. With ``A`` the largest unscaled magnitude, they overflow exactly from
``overflow_limit / A`` on. If ``A`` is unknown, a step that was clean at some scale is clean at smaller ones, and a step
that overflowed does so at larger ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.tail import Tail, flushed_tail


@dataclass(frozen=True)
class OverflowLimit:
    """The loss scale from which on the gradients of one step overflow.

    Attributes:
        clean_up_to: no gradient overflows at this scale or below; 0 if no scale is known to be clean.
        overflows_from: a gradient overflows at this scale and above; Inf if no scale is known to overflow.
        estimate: the smallest scale assumed to overflow; between the other two.
    """

    clean_up_to: float
    overflows_from: float
    estimate: float

    @classmethod
    def unknown(cls) -> OverflowLimit:
        """Nothing is known; every scale is assumed to be clean."""
        return cls(0.0, math.inf, math.inf)

    @classmethod
    def always(cls) -> OverflowLimit:
        """Non-finite at any scale: the forward pass, or the loss itself."""
        return cls(0.0, 0.0, 0.0)

    @classmethod
    def of_amax(cls, amax: float, fmt: Format = FP16) -> OverflowLimit:
        """Derive the exact limit from the largest magnitude of the *unscaled* gradients, which are stored in ``fmt``.

        Raises:
            ValueError: ``amax`` is negative or not finite.
        """
        if not 0.0 <= amax < math.inf:
            raise ValueError(f"an amax is finite and not negative, got {amax!r}")
        first = _first_overflowing(amax, fmt)
        return cls(math.nextafter(first, 0.0) if first < math.inf else math.inf, first, first)

    def observed(self, scale: float, *, overflow: bool) -> OverflowLimit:
        """Combine the limit with an observation of the step at ``scale``, which overrides facts that contradict it.

        After an overflow the finite elements say nothing about those that left the range: the limit lies at or below
        ``scale``, and is estimated as half of it unless a smaller estimate is known.
        """
        if scale == 0.0:  # gradients times 0 prove nothing, but one that is not finite even at 0 always is
            return OverflowLimit.always() if overflow else self
        if overflow:
            likely = self.estimate if self.estimate <= scale else math.nextafter(scale / 2.0, math.inf)
            return OverflowLimit(min(self.clean_up_to, likely, math.nextafter(scale, 0.0)), scale, likely)
        above = math.nextafter(scale, math.inf)
        return OverflowLimit(
            max(self.clean_up_to, scale), max(self.overflows_from, above), max(self.estimate, above)
        )  # fmt: skip

    def overflows(self, scale: float) -> bool | None:
        """Whether the step overflows at ``scale``; None if unknown."""
        if scale <= self.clean_up_to:
            return False
        return True if scale >= self.overflows_from else None

    @property
    def ideal(self) -> Estimate:
        """The largest power of two without overflow, which is also the one that flushes least.

        0 if no scale is clean, Inf if every scale is. ``low`` is surely clean.
        """
        low = _power_below(math.nextafter(self.clean_up_to, math.inf))
        return Estimate.of(low, max(low, _power_below(self.overflows_from)), _power_below(self.estimate))


def _first_overflowing(amax: float, fmt: Format) -> float:
    """Return the smallest scale whose product with ``amax`` overflows under round-to-nearest; Inf if there is none."""
    if amax == 0.0:
        return math.inf
    scale = fmt.overflow_limit / amax
    if scale == math.inf:
        return scale
    while fmt.overflows(amax * math.nextafter(scale, 0.0)):
        scale = math.nextafter(scale, 0.0)
    while not fmt.overflows(amax * scale):
        scale = math.nextafter(scale, math.inf)
    return scale


def _power_below(value: float) -> float:
    """Return the largest power of two below ``value``; 0 and Inf stay."""
    if value in (0.0, math.inf):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (2 if mantissa == 0.5 else 1))


@dataclass(frozen=True, eq=False)
class StepGradients:
    """The known facts about the gradients of one scaler update.

    Attributes:
        histogram: exponents of the gradients as stored, times ``scale``; None for a step that is not sampled.
        zeros: number of elements that were exactly zero: structural, or flushed by a cast.
        scale: the loss scale that the recorded gradients carry.
        rounded: whether they were cast to ``format`` at ``scale``, so that some of the zeros may be flushed elements.
    """

    step: int
    limit: OverflowLimit
    histogram: ExponentHistogram | None = None
    zeros: int = 0
    scale: float = 1.0
    format: Format = FP16
    rounded: bool = False

    @cached_property
    def _tail(self) -> Tail | None:
        if not self.rounded or self.histogram is None or self.zeros == 0:
            return None
        return flushed_tail(self.histogram, self.zeros, self.format)

    def flushed(self, scale: float) -> Estimate | None:
        """Share of the gradient elements, structural zeros left out, that are zero at loss scale ``scale``.

        Unknown is which of the recorded zeros the cast made: ``low`` takes all of them as recovered, ``high`` as lost,
        and the estimate follows the shape of the histogram at the flush limit (:mod:`precdoctor.numerics.tail`). None
        if the step is not sampled.

        Raises:
            ValueError: ``scale`` is not a finite positive number.
        """
        if self.histogram is None:
            return None
        if not 0.0 < scale < math.inf:
            raise ValueError(f"a loss scale is a finite positive number, got {scale!r}")
        ratio = scale / self.scale
        seen, zeros = float(self.histogram.total), float(self.zeros)
        low, high, likely = self._newly_flushed(self.histogram, self.format.flush_limit / ratio)
        if not self.rounded:
            return _share(low, high, likely, seen, seen, seen)
        hidden = self._tail.total if self._tail is not None else 0.0
        still = self._tail.still_flushed(self.format, ratio) if self._tail is not None else 0.0
        return _share(low, high + zeros, likely + still, seen + zeros, seen + zeros, seen + hidden)

    def _newly_flushed(self, histogram: ExponentHistogram, limit: float) -> tuple[float, float, float]:
        """Count the recorded non-zero elements whose true magnitude is at most ``limit``: minimum, maximum, likely.

        A stored element that was rounded may come from up to half a step away: one at the limit, from above it.
        """
        reached = histogram.at_most(limit)
        middle = (reached.low + reached.high) / 2.0
        if not self.rounded:
            return reached.low, reached.high, middle
        sure = histogram.at_most(limit / 2.0).low
        # With n steps up to the limit, the top bin covers n/2 + 1/2 to n + 1/2 steps; the first bin 1/2 to 3/2.
        likely = sure + (middle - sure) * (1.0 - 1.0 / max(limit / self.format.min_subnormal, 2.0))
        return sure, reached.high, likely


def _share(low: float, high: float, estimate: float, of_low: float, of_high: float, of: float) -> Estimate:
    """Divide low, high and estimate by totals of their own; all 0 if there are no elements."""
    if of_high == 0.0:
        return Estimate(0.0, 0.0, 0.0)
    return Estimate.of(low / of_low, high / of_high, estimate / of if of else 0.0)
