"""Draws a series as one line of characters. A bucket shows its largest value, never a mean, so that peaks survive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.:-=+*#"


def sparkline(values: Sequence[float | None], width: int = 60, *, ascii_only: bool = False, log: bool = False) -> str:
    """``values`` as at most ``width`` characters; ``x`` is a NaN or Inf, a blank is a missing value.

    Args:
        values: one number per step, in order; None for a step without one.
        width: most characters; longer series are divided into buckets, which show a non-finite value if they hold one,
            else their largest value.
        ascii_only: use plain ASCII levels.
        log: logarithmic heights, for series of positive numbers over many decades (ignored if any is not positive).
    """
    cells = _buckets(values, width)
    finite = [v for v in cells if v is not None and math.isfinite(v)]
    if log and finite and min(finite) > 0:
        cells = [math.log(v) if v is not None and math.isfinite(v) else v for v in cells]
        finite = [math.log(v) for v in finite]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    levels = _ASCII if ascii_only else _BLOCKS
    return "".join(_cell(v, low, high, levels) for v in cells)


def _buckets(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [worst(v for v in values[a:b] if v is not None) for a, b in itertools.pairwise(edges)]


def worst(bucket: Iterable[float]) -> float | None:
    """The first non-finite value of a bucket, else its largest; None if it is empty."""
    values = list(bucket)
    return next((v for v in values if not math.isfinite(v)), max(values, default=None))


def _cell(value: float | None, low: float, high: float, levels: str) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return "x"
    if high == low:
        return levels[0] if value == 0 else levels[3]
    return levels[min(int((value - low) / (high - low) * len(levels)), len(levels) - 1)]
