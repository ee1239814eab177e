"""Operands that a scale per block would serve better."""

import numpy as np

from tests.support.fp8 import current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


def one_channel() -> Training:
    """Not far enough from the rest to do real harm: PD408 stays silent."""

    def draw(step: int) -> np.ndarray:
        x = draws(1, (64, 512))(step)
        x[:, 9] *= 2.0**13.3
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def gaussian() -> Training:
    return in_fp8()


def one_outlier() -> Training:
    """Theory's own: 64x1024 of sigma 0.3 and one element of 200. The error of the others is 2.63 % and 2.57 %."""

    def draw(step: int) -> np.ndarray:
        x = 0.3 * draws(2, (64, 1024))(step)
        x[5, 77] = 200.0
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


FIRING = {
    "one_channel": Sample(
        one_channel, module=UP, kind="fp8_operand", severity="info", says=("would gain", "1.5 dB (limit)")
    ),
}
HEALTHY = {f.__name__: f for f in (gaussian, one_outlier)}
