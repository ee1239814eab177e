"""Sketches tell how far two tensors are apart."""

from __future__ import annotations

import math

import numpy as np

from precdoctor.numerics import sketch
from tests.support.op_lists import sketch_of

#: The first numbers of SplitMix64 from seed 0, as its reference implementation prints them.
REFERENCE = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B)


def test_signs_are_those_of_splitmix64_and_balanced():
    signs = sketch.tile_signs()
    assert signs[:5].tolist() == [-1.0 if number >> 63 else 1.0 for number in REFERENCE]
    assert abs(signs.mean()) < 4 / math.sqrt(sketch.TILE)
    assert abs((signs[1:] * signs[:-1]).mean()) < 4 / math.sqrt(sketch.TILE)
    assert np.array_equal(sketch.repetition_signs(3, 4), sketch.repetition_signs(0, 7)[3:])


def test_the_distance_of_sketches_is_that_of_the_tensors():
    ratios = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = rng.normal(0, 1, 1000)
        y = x + rng.normal(0, 1e-6, 1000)
        ratios.append(math.dist(sketch_of(x), sketch_of(y)) / np.linalg.norm(x - y))
    assert 0.9 < np.mean(np.square(ratios)) < 1.1
    assert 0.15 < np.std(ratios) < 0.35 and min(ratios) > 0.3
