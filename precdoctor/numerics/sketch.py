"""Sketches: eight sums per tensor from which the distance of two tensors is estimated without loading both.

Element i of a tensor, in logical order, is added to sum i mod 8 with a sign that depends on i alone. The squared
distance of two sketches is then an unbiased estimate of that of the tensors (a count sketch; Charikar et al., 2002),
with a relative standard deviation of at most one half; for the distance, about a quarter.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from precdoctor.numerics.arrays import Floats

WIDTH: Final = 8
#: Signs repeat after this many elements; each repetition is multiplied by a sign of its own.
TILE: Final = 1 << 14
#: Index in the sign sequence at which the signs of the repetitions begin.
_REPETITIONS: Final = 1 << 40


@functools.cache
def tile_signs() -> Floats:
    """Return the signs of the elements of one tile: 1.0 or -1.0, shape ``(TILE,)``."""
    return _signs(0, TILE)


@functools.lru_cache(maxsize=64)
def repetition_signs(first: int, count: int) -> Floats:
    """Return the signs of tiles ``first`` to ``first + count - 1``, shape ``(count,)``."""
    return _signs(_REPETITIONS + first, count)


def _signs(first: int, count: int) -> Floats:
    """Return the highest bit of SplitMix64 of each index as a sign: identical on every machine and in every version."""
    x = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where((x ^ (x >> np.uint64(31))) >> np.uint64(63), -1.0, 1.0)
