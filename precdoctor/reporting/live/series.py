"""A series that goes on for as long as a training does, in memory that does not grow."""

from __future__ import annotations

import math

#: Most values kept; beyond, neighbours share one.
MOST = 2048


class Series:
    """Values by step. Where several steps, ranks or optimizers share a place, a NaN or Inf stays, else the largest.

    Attributes:
        last: the value of the latest step; None before there is one.
    """

    def __init__(self) -> None:
        self._width = 1
        self._cells: dict[int, float] = {}
        self._last: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        """Take one value; steps may come in any order."""
        at = step // self._width
        self._cells[at] = worse(self._cells.get(at), value)
        if self._last is None or step > self._last[0]:
            self._last = (step, value)
        elif step == self._last[0]:
            self._last = (step, worse(self._last[1], value))
        while len(self._cells) > MOST:
            self._width *= 2
            cells, self._cells = self._cells, {}
            for place, kept in cells.items():
                self._cells[place // 2] = worse(self._cells.get(place // 2), kept)

    @property
    def last(self) -> float | None:
        return None if self._last is None else self._last[1]

    @property
    def values(self) -> list[float]:
        """What is kept, by step."""
        return [self._cells[at] for at in sorted(self._cells)]


def worse(a: float | None, b: float) -> float:
    """The one to show of two: one that is not finite, else the larger."""
    if a is None or not math.isfinite(b):
        return b
    return a if not math.isfinite(a) else max(a, b)
