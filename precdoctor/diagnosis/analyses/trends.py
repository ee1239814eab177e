"""Straight lines through log2 of a series: how fast it grows, with what certainty, and when it reaches a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from precdoctor.numerics.arrays import Floats

#: Fewest points that are fitted: four in the newer half.
_MIN_POINTS = 8
#: Standard errors on either side of a slope, which make an interval of 95 %.
_ERRORS = 2.0
#: Factor between the ends of a forecast above which it is wide; fewest fitted points of a trend that is not short.
_WIDE, _LONG = 4.0, 24
#: Factor by which the squared residuals of two constants are less than those of the line if the series jumped once.
_JUMP = 4.0


class Forecast(NamedTuple):
    """Number of steps until a limit is reached, with an interval of 95 %; ``high`` may be infinite."""

    low: float
    estimate: float
    high: float

    @property
    def is_wide(self) -> bool:
        """Whether the ends of the interval are far apart."""
        return self.high > _WIDE * max(self.low, 1.0)

    @property
    def interval_words(self) -> str:
        """``120 to 340``, or ``120 or more`` if ``high`` is infinite."""
        return f"{self.low:,.0f} to {self.high:,.0f}" if math.isfinite(self.high) else f"{self.low:,.0f} or more"

    @property
    def reason(self) -> str:
        """The basis of the forecast, for ``confidence_reason``."""
        return "a straight line in log2 over the newer half of the steps" + ", with a wide interval" * self.is_wide


@dataclass(frozen=True)
class Trend:
    """A straight line through log2(amax) over the newer half of the steps; slopes in binades per step.

    Attributes:
        low, high: interval of 95 % of the slope.
        overall: slope of a line through all steps.
        climbed: rise of the line over the fitted steps, in binades.
        level: the line's value at the last step: log2 of an amax.
        points: number of fitted points.
        first, last: first and last fitted step.
        jumped: whether two constants, one up to some step and one from there on, fit far better than the line.
    """

    slope: float
    low: float
    high: float
    overall: float
    climbed: float
    level: float
    points: int
    first: int
    last: int
    jumped: bool

    @property
    def rises(self) -> bool:
        """Whether the slope is certainly positive, at least half of the slope over all steps, and no single jump."""
        return self.low > 0.0 and self.slope >= 0.5 * self.overall and not self.jumped

    @property
    def is_short(self) -> bool:
        """Whether few points were fitted."""
        return self.points < _LONG

    def steps_to(self, limit: float) -> Forecast:
        """Forecast the number of steps from the last one until the amax reaches ``limit``; the slope must be > 0."""
        room = max(0.0, math.log2(limit) - self.level)
        return Forecast(room / self.high, room / self.slope, room / self.low if self.low > 0.0 else math.inf)


def fit(points: Sequence[tuple[int, float]]) -> Trend | None:
    """Fit a trend to the newer half of the points ``(step, amax)``; None if there are too few."""
    if len(points) < _MIN_POINTS or points[-1][0] == points[len(points) // 2][0]:
        return None
    steps = np.array([s for s, _ in points], dtype=np.float64)
    y = np.log2([a for _, a in points])
    overall = float(np.polyfit(steps, y, 1)[0])
    half = len(points) // 2
    x, z = steps[half:], y[half:]
    slope, start = (float(c) for c in np.polyfit(x, z, 1))
    residual = z - (slope * x + start)
    n = x.size
    energy = float((residual**2).sum())
    rho = float((residual[1:] * residual[:-1]).sum()) / energy if energy > 0.0 else 0.0
    effective = max(3.0, n * (1.0 - max(0.0, rho)) / (1.0 + max(0.0, rho)))
    centred = float(((x - x.mean()) ** 2).sum())
    error = math.sqrt(energy / (n - 2) / centred * n / effective)
    margin = _ERRORS * error
    last = float(x[-1])
    return Trend(slope, slope - margin, slope + margin, overall, slope * (last - float(x[0])), slope * last + start, n,
                 int(x[0]), int(last), _JUMP * _two_levels(z) < energy)  # fmt: skip


def _two_levels(y: Floats) -> float:
    """Return the least sum of squared residuals of two constants, one for a first part of ``y`` and one for the rest.

    Each part has at least two points: one outlier at an end is no level.
    """
    return min(float(((y[:i] - y[:i].mean()) ** 2).sum() + ((y[i:] - y[i:].mean()) ** 2).sum())
               for i in range(2, y.size - 1))  # fmt: skip
