"""Scales out of an amax that was zero or not finite."""

import math

import numpy as np

from precdoctor.numerics.formats import E5M2
from tests.support.fp8 import add_operand, draws, fill, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


def values(step: int) -> np.ndarray:
    """Zero on the first step, as above an output layer that starts at zero."""
    return draws(1)(step) * (0.0 if step == 0 else 1.0)


def epsilon() -> Training:
    """448 / 1e-12 behind the zero."""
    return add_operand(
        in_fp8(), "head", "grad_output",
        lambda s: (values(s), 57344.0 / max(np.abs(values(s - 1)).max() if s else 0.0, 1e-12)), E5M2,
    )  # fmt: skip


def infinite() -> Training:
    """448 / 0 on every step of a branch that is not used."""
    return add_operand(in_fp8(), "head", "input", lambda _: (np.zeros((32, 256)), math.inf))


def poisoned_history() -> Training:
    """An infinite amax at step 3: the scale is 0 while it stays in the history."""
    draw = draws(2)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s), 0.0 if 4 <= s < 10 else fill(draw(s)))})


def kept() -> Training:
    """The scale before, 1 at the start."""
    return add_operand(in_fp8(), "head", "grad_output", lambda s: (values(s), fill(values(s - 1)) if s else 1.0), E5M2)


def frozen() -> Training:
    """All zeros under 448 / 1e-12, on every step."""
    return add_operand(in_fp8(), "head", "grad_output", lambda _: (np.zeros((32, 256)), 4.48e14))


def large_scale() -> Training:
    draw = draws(3)
    return in_fp8(casts={(UP, "input"): lambda s: (draw(s) * 1e-9, fill(draw(s) * 1e-9))})


FIRING = {
    "epsilon": Sample(
        epsilon, step=1, module="head", kind="fp8_operand", severity="warning", says=("amax was 0 at step 0", "clipped")
    ),
    "infinite": Sample(infinite, step=0, module="head", says=("inf", "NaN or infinite")),
    "poisoned_history": Sample(poisoned_history, step=4, module=UP, says=("infinite", "became zero")),
}
HEALTHY = {f.__name__: f for f in (kept, frozen, large_scale)}
