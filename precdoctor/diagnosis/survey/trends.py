"""Straight lines through log2 of a series: how fast it grows, with what certainty, and when it reaches a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

#: Fewest points for a line: four in the newer half.
_MIN_POINTS = 8
#: Standard errors on either side of a slope: an interval of 95 %.
_ERRORS = 2.0
#: Factor between the ends of a forecast from which on it is wide, and fewest points of a line that is not short.
_WIDE, _LONG = 4.0, 24


class Forecast(NamedTuple):
    """Steps until a limit is reached, with an interval of 95 %."""

    low: float
    estimate: float
    high: float

    @property
    def is_wide(self) -> bool:
        """Whether its ends are far apart."""
        return self.high > _WIDE * max(self.low, 1.0)

    @property
    def interval_words(self) -> str:
        """``120 to 340``; ``120 or more`` without an end."""
        return f"{self.low:,.0f} to {self.high:,.0f}" if math.isfinite(self.high) else f"{self.low:,.0f} or more"

    @property
    def reason(self) -> str:
        """What the confidence in it rests on."""
        return "a straight line in log2 over the newer half of the steps" + ", with a wide interval" * self.is_wide


@dataclass(frozen=True)
class Trend:
    """A straight line through log2(amax) over steps; slopes in binades per step.

    Attributes:
        low, high: interval of the slope.
        overall: slope over all steps.
        climbed: binades that the line climbed over the fitted steps.
        level: the line's value at the last step.
        first, last: the fitted steps.
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

    @property
    def rises(self) -> bool:
        """Whether it certainly goes up, at no less than half of the slope of the whole run."""
        return self.low > 0.0 and self.slope >= 0.5 * self.overall

    @property
    def is_short(self) -> bool:
        """Whether few points were fitted."""
        return self.points < _LONG

    def steps_to(self, limit: float) -> Forecast:
        """Steps from the last one until the line reaches log2 ``limit``."""
        room = max(0.0, math.log2(limit) - self.level)
        return Forecast(room / self.high, room / self.slope, room / self.low if self.low > 0.0 else math.inf)


def fit(points: Sequence[tuple[int, float]]) -> Trend | None:
    """The trend of the newer half of ``(step, amax)``; None if there are too few points for a line."""
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
                 int(x[0]), int(last))  # fmt: skip
