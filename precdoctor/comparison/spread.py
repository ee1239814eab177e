"""How far healthy repeats of a training lie apart, and how far is too far.

A handful of repeats says little about one tensor alone. So its variance is moderated by what is typical of its kind, as
in Smyth (2004), "Linear models and empirical Bayes methods", it never counts as steadier than is typical of its kind,
and limits are quantiles of Student's t with the degrees of freedom that follow. From six repeats on, a spread does not
see single outliers: repeats far from the median, in median absolute deviations, are left out of it. With fewer, nobody
can tell an outlier from spread, and a wide limit is the better error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median, stdev

#: The median absolute deviation of a Gaussian is its standard deviation over this.
_MAD = 1.4826
#: Repeats needed before one of them can be called an outlier, and how many robust deviations make it one.
_ENOUGH, _OUTLYING = 6, 5.0
#: What the tensors of a kind say about one of them counts as much as this many further repeats.
PRIOR_FREEDOM = 4
#: With a single repeat nothing was learned: limits are this many default spreads, and many more when the run does not
#: begin from the same weights and data (measured: healthy seeds of a short training lie up to 25 % apart in loss and
#: three binades in the gradient of a bias).
SINGLE_RUN_FACTOR, OTHER_SEED_FACTOR = 4.0, 24.0

#: Of the values' range.
_ROUNDING = 1e-9


def robust_spread(values: Sequence[float]) -> float:
    """One standard deviation of the values without outliers; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    robust = _MAD * median(abs(v - middle) for v in values)
    # Where more than half of the values agree, but for rounding, the middle one says nothing of the others.
    if len(values) >= _ENOUGH and robust > _ROUNDING * (max(values) - min(values)):
        values = [v for v in values if abs(v - middle) <= _OUTLYING * robust]
    return stdev(values)


def moderated(own: float, typical: float, repeats: int) -> float:
    """A tensor's spread drawn towards what is typical of its kind, the fewer repeats the more, and never below."""
    freedom = max(0, repeats - 1)
    whole = freedom + PRIOR_FREEDOM
    # hypot: squares of spreads below 1e-154 would be subnormal
    return max(typical, math.hypot(own * math.sqrt(freedom / whole), typical * math.sqrt(PRIOR_FREEDOM / whole)))


@lru_cache(maxsize=256)
def limit_factor(repeats: int, comparisons: int, false_alarms: float) -> float:
    """How many spreads from the centre of ``repeats`` healthy runs the next healthy one stays, almost surely.

    Args:
        comparisons: made at once; the chance is divided among them (Bonferroni).
        false_alarms: the accepted chance that any of them alarms on a healthy run.
    """
    if repeats < 2:
        return SINGLE_RUN_FACTOR
    tail = false_alarms / (2.0 * max(1, comparisons))
    # the centre is itself a median of `repeats` values: its variance is pi / 2 / repeats
    return student_quantile(tail, repeats - 1 + PRIOR_FREEDOM) * math.sqrt(1.0 + math.pi / 2.0 / repeats)


def student_quantile(tail: float, freedom: float) -> float:
    """The point that Student's t exceeds with probability ``tail``; Wallace's (1959) approximation, inverted.

    Never too small from 4 degrees of freedom on; too large by 1 % at 13 degrees and a tail of 1e-8, by 15 % at 5.
    """
    z = NormalDist().inv_cdf(1.0 - tail) if tail > 1e-16 else 8.3
    corrected = z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return math.sqrt(freedom * math.expm1(corrected**2 / freedom))
