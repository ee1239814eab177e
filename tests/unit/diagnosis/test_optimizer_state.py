"""What exact arithmetic would have left of a second moment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.analyses.optimizer_states import excess


def recorded(v: np.ndarray, squares: np.ndarray, every: int, decay: float) -> float | None:
    """What is left of a moment recorded every so many steps; both arrays are means over elements."""
    steps = np.arange(0, len(v), every)
    return excess(steps, v[steps], squares[steps], decay)


def ema(squares: np.ndarray, decay: float) -> np.ndarray:
    v, out = 0.0, []
    for square in squares:
        v = decay * v + (1.0 - decay) * square
        out.append(v)
    return np.array(out)


@given(st.floats(1e-12, 1e3), st.sampled_from([0.9, 0.99, 0.999]), st.integers(1, 16))
def test_an_exact_moment_of_level_gradients_is_neither_too_large_nor_too_small(square, decay, every):
    squares = np.full(200, square)
    assert recorded(ema(squares, decay), squares, every, decay) == pytest.approx(1.0, rel=1e-6)


def test_a_moment_that_never_decays_is_found_out():
    squares = np.where(np.arange(6000) < 200, 1.0, 1e-4)
    stuck = np.maximum.accumulate(ema(squares, 0.999))
    exact = ema(squares, 0.999)
    assert recorded(exact, squares, 8, 0.999) == pytest.approx(1.0, rel=0.1)
    assert recorded(stuck, squares, 8, 0.999) == pytest.approx(stuck[-1] / exact[-1], rel=0.1)
    assert stuck[-1] / exact[-1] > 10


def test_one_look_tells_nothing():
    assert recorded(np.ones(1), np.ones(1), 1, 0.999) is None
