"""FP8 operands whose amax runs away."""

import numpy as np

from tests.support.fp8 import SHAPE, current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

DOWN = "blocks.0.mlp.down"


def runaway(step: int) -> np.ndarray:
    """One channel of 256 doubles every three steps."""
    size = np.ones(SHAPE[1])
    size[7] = 2.0 ** (step / 3.0)
    return draws(1)(step) * size


def one_channel() -> Training:
    return in_fp8(30, {(DOWN, "input"): current(runaway)})


def all_of_it() -> Training:
    """The bulk grows with it: the scale follows, and nothing is lost."""
    return in_fp8(30, {(DOWN, "input"): current(lambda s: draws(2)(s) * 2.0 ** (s / 3.0))})


def first_steps() -> Training:
    """Grows, and levels off."""
    return in_fp8(30, {(DOWN, "input"): current(lambda s: draws(3)(s) * 64.0 * (1.0 - np.exp(-(s + 0.1) / 4.0)))})


def wobbling() -> Training:
    return in_fp8(30, {(DOWN, "input"): current(lambda s: draws(4)(s) * 4.0 ** np.sin(s))})


FIRING = {
    "one_channel": Sample(
        one_channel, module=DOWN, kind="fp8_operand", severity="warning",
        says=("grows by a factor", "binades", "limit 3", "18.8"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (all_of_it, first_steps, wobbling)}
