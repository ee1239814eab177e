"""What exact arithmetic would have left of a second moment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.survey.optimizer_states import Held, Moment, excess
from precdoctor.diagnosis.survey.view import Process
from precdoctor.numerics.histogram import ExponentHistogram


def held(total: float, squares: float, scale: float = 1.0) -> Held:
    return Held("Linear", "float32", 8, 0, 0, total, squares, ExponentHistogram.of(None, None), scale)


def moments(v: np.ndarray, squares: np.ndarray, every: int, scale: float = 1.0) -> list[Moment]:
    """Recorded every so many steps; both arrays are means over eight elements."""
    steps = range(0, len(v), every)
    return [
        Moment(Process(0, 0), s, "weight.exp_avg_sq", held(8 * v[s], 0.0), held(0.0, 8 * squares[s] * scale**2, scale))
        for s in steps
    ]


def ema(squares: np.ndarray, decay: float) -> np.ndarray:
    v, out = 0.0, []
    for square in squares:
        v = decay * v + (1.0 - decay) * square
        out.append(v)
    return np.array(out)


@given(st.floats(1e-12, 1e3), st.sampled_from([0.9, 0.99, 0.999]), st.integers(1, 16), st.sampled_from([1.0, 1024.0]))
def test_an_exact_moment_of_level_gradients_is_neither_too_large_nor_too_small(square, decay, every, scale):
    squares = np.full(200, square)
    assert excess(moments(ema(squares, decay), squares, every, scale), decay) == pytest.approx(1.0, rel=1e-6)


def test_a_moment_that_never_decays_is_found_out():
    squares = np.where(np.arange(6000) < 200, 1.0, 1e-4)
    stuck = np.maximum.accumulate(ema(squares, 0.999))
    exact = ema(squares, 0.999)
    assert excess(moments(exact, squares, 8), 0.999) == pytest.approx(1.0, rel=0.1)
    assert excess(moments(stuck, squares, 8), 0.999) == pytest.approx(stuck[-1] / exact[-1], rel=0.1)
    assert stuck[-1] / exact[-1] > 10


def test_one_look_tells_nothing():
    assert excess(moments(np.ones(1), np.ones(1), 1), 0.999) is None
