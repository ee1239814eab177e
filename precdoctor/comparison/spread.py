"""Estimates the spread between healthy repeats of a training, and the limits that follow from it.

A handful of repeats says little about one tensor. Its variance is therefore moderated by that typical of its kind, as
in Smyth (2004), "Linear models and empirical Bayes methods", and its spread is never taken below the typical one.
Limits are quantiles of Student's t with the moderated degrees of freedom. From six repeats on, outliers (repeats far
from the median, in median absolute deviations) are excluded from the spread. With fewer repeats an outlier cannot be
distinguished from spread, and a limit that is too wide is the lesser error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median, stdev

#: Standard deviation of a Gaussian over its median absolute deviation.
GAUSSIAN_MAD = 1.4826
#: Fewest repeats among which an outlier is looked for, and the robust deviations from the median that make it one.
_ENOUGH, _OUTLYING = 6, 5.0
#: Prior degrees of freedom: the typical spread of a kind counts as much as this many further repeats.
PRIOR_FREEDOM = 4
#: A single repeat has no spread. Limits are then this many default spreads; the second number if the run does not begin
#: from the same weights and data (measured: healthy seeds of a short training differ by up to 25 % in loss and three
#: binades in the gradient of a bias).
SINGLE_RUN_FACTOR, OTHER_SEED_FACTOR = 4.0, 24.0

#: Differences below this share of the values' range are rounding.
_ROUNDING = 1e-9


def robust_spread(values: Sequence[float]) -> float:
    """The standard deviation of the values without outliers; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    robust = GAUSSIAN_MAD * median(abs(v - middle) for v in values)
    # If more than half of the values agree up to rounding, the MAD is about 0 and would make outliers of all others.
    if len(values) >= _ENOUGH and robust > _ROUNDING * (max(values) - min(values)):
        values = [v for v in values if abs(v - middle) <= _OUTLYING * robust]
    return stdev(values)


def moderated(own: float, typical: float, repeats: int) -> float:
    """A tensor's spread shrunk towards the typical one of its kind (more for fewer repeats), and never below it."""
    freedom = max(0, repeats - 1)
    whole = freedom + PRIOR_FREEDOM
    # hypot: squares of spreads below 1e-154 would be subnormal
    return max(typical, math.hypot(own * math.sqrt(freedom / whole), typical * math.sqrt(PRIOR_FREEDOM / whole)))


@lru_cache(maxsize=256)
def limit_factor(repeats: int, comparisons: int, false_alarms: float) -> float:
    """The limit for a healthy run, in spreads from the centre of the baseline.

    Args:
        repeats: number of healthy runs in the baseline, at least 2.
        comparisons: number of comparisons made; the chance of an alarm is divided among them (Bonferroni).
        false_alarms: accepted chance that any comparison fails on a healthy run.
    """
    tail = false_alarms / (2.0 * max(1, comparisons))
    # the centre is itself a median of `repeats` values: its variance is pi / 2 / repeats
    return student_quantile(tail, repeats - 1 + PRIOR_FREEDOM) * math.sqrt(1.0 + math.pi / 2.0 / repeats)


def student_quantile(tail: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability ``tail``; Wallace's (1959) approximation, inverted.

    From 4 degrees of freedom on never too small; too large by 1 % at 13 degrees and a tail of 1e-8, by 15 % at 5.
    """
    z = NormalDist().inv_cdf(1.0 - tail) if tail > 1e-16 else 8.3
    corrected = z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(corrected**2 / freedom))
