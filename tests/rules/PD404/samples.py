"""Delayed scaling behind amax that jumps."""

import numpy as np

from tests.support.fp8 import current, delayed, draws, fill, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


def batches(step: int) -> np.ndarray:
    """Every fourth is sixteen times as large."""
    return draws(1)(step) * (16.0 if step % 4 == 3 else 1.0)


def short_history() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(batches, 1)})


def growing() -> Training:
    """Twice as large every step: no history is long enough, a margin is."""
    return in_fp8(16, {(UP, "input"): delayed(lambda s: draws(2)(s) * 4.0**s, 4)})


def long_enough() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(batches, 16)})


def current_scaling() -> Training:
    return in_fp8(24, {(UP, "input"): current(batches)})


def heavy_tails() -> Training:
    """Stationary, but one step in seventeen exceeds any sixteen before it."""
    tails = lambda s: np.random.default_rng((5, s)).standard_t(3, size=(32, 256))  # noqa: E731
    return in_fp8(40, {(UP, "input"): delayed(tails, 16)})


def always_too_large() -> Training:
    """Current scaling with a factor of 1.02: clips 448 to 464 and nothing else, and lags behind nothing."""
    return in_fp8(24, {(UP, "input"): lambda s: (batches(s), 1.02 * fill(batches(s)))})


def grows_from_zero() -> Training:
    """A weight that begins at zero and grows by the learning rate: 1, 2, 3 ... times that."""
    return in_fp8(24, {(UP, "weight"): delayed(lambda s: draws(7)(0) * 2e-3 * s, 16)})


def one_spike() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(lambda s: draws(3)(s) * (64.0 if s == 9 else 1.0), 4)})


def most_recent_of_a_steady_tensor() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(draws(4), 1)})


FIRING = {
    "short_history": Sample(
        short_history, module=UP, kind="fp8_operand", severity="warning",
        says=("a history of 1 step", "limit 10 %", "binades above 448"), evidence={"recipe": "delayed:1:max"},
    ),
    "growing": Sample(growing, module=UP, severity="error", says=("stale on 100 % of the steps",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        always_too_large,
        grows_from_zero,
        long_enough,
        current_scaling,
        heavy_tails,
        one_spike,
        most_recent_of_a_steady_tensor,
    )
}
