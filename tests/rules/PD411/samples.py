"""Delayed scaling that remembers one spike for too long."""

import numpy as np

from tests.support.fp8 import delayed, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


def spiky(binades: float):
    """A spike at step 5."""
    return lambda s: draws(1)(s) * (2.0**binades if s == 5 else 1.0)


def long_history() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(spiky(14.0), 1024)})


def short_history() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(spiky(14.0), 4)})


def small_spike() -> Training:
    """Six binades: E4M3 has them to spare."""
    return in_fp8(24, {(UP, "input"): delayed(spiky(6.0), 1024)})


def shrinking() -> Training:
    """Gradients that shrink by half every five steps, with a history of 16: three binades of padding."""
    return in_fp8(24, {(UP, "input"): delayed(lambda s: draws(2)(s) * 2.0 ** (-s / 5.0), 16)})


def sparse_zeros() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(lambda s: np.maximum(draws(3)(s), 0.0), 1024)})


FIRING = {
    "long_history": Sample(
        long_history, module=UP, kind="fp8_operand", severity="warning",
        says=("spike of step 5", "limit 25 %", "binades of float8_e4m3fn unused"), evidence={"spike_step": 5},
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (short_history, small_spike, shrinking, sparse_zeros)}
