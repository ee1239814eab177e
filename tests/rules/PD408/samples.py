"""Outliers that set the scale of all the rest."""

import numpy as np

from tests.support.fp8 import current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"
SHAPE = (32, 1024)


def channel(binades: float, features: int = 1024) -> Training:
    def draw(step: int) -> np.ndarray:
        x = draws(1, (32, features))(step)
        x[:, 17] *= 2.0**binades
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def one_channel() -> Training:
    return channel(14.5)


def one_row() -> Training:
    """A token in place of a channel."""

    def draw(step: int) -> np.ndarray:
        x = draws(2, (256, 256))(step)
        x[step % 256, :64] *= 2.0**14.5
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def within_the_range() -> Training:
    """A thousand times the rest: a ratio of amax to RMS that frightens tutorials."""
    return channel(10.0)


def in_every_block() -> Training:
    """32 features: the channel is in every block, and blocks do not help."""
    return channel(14.5, features=32)


def probabilities() -> Training:
    """One element of each row is near 1, the others far below: together they are nothing."""

    def draw(step: int) -> np.ndarray:
        x = np.abs(draws(3, SHAPE)(step)) * 1e-7
        x[:, step % 1024] = 1.0
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def moderate_channel() -> Training:
    """Far enough from the rest for blocks to gain 1.5 dB, and not for real harm."""

    def draw(step: int) -> np.ndarray:
        x = draws(1, (64, 512))(step)
        x[:, 9] *= 2.0**13.3
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def one_outlier() -> Training:
    """64x1024 of sigma 0.3 and one element of 200. The error of the others is 2.63 % per tensor and 2.57 % in tiles."""

    def draw(step: int) -> np.ndarray:
        x = 0.3 * draws(2, (64, 1024))(step)
        x[5, 77] = 200.0
        return x

    return in_fp8(casts={(UP, "input"): current(draw)})


def gaussian() -> Training:
    return in_fp8()


FIRING = {
    "one_channel": Sample(
        one_channel, module=UP, kind="fp8_operand", severity="warning", says=("limit 3", "dB", "blocks of 128")
    ),
    "one_row": Sample(one_row, module=UP, severity="warning", says=("outliers",)),
}
HEALTHY = {
    f.__name__: f for f in (within_the_range, in_every_block, probabilities, moderate_channel, one_outlier, gaussian)
}
