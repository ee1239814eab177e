"""Confidence intervals of shares."""

from __future__ import annotations

import math


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of ``hits / total`` (Wilson 1927): right for few cases, and for shares near 0 and 1.

    Raises:
        ValueError: more hits than cases, or no case.
    """
    if not 0 <= hits <= total or not total:
        raise ValueError(f"{hits} of {total} is no share")
    p, z = hits / total, 1.96
    middle = (p + z * z / 2 / total) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / 4 / total / total)
    return max(0.0, middle - half), min(1.0, middle + half)
