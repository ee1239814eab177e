"""Scales that do not fit: behind amax that jumps, held down by an old spike, made of an amax that is none."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from precdoctor.numerics.formats import E5M2
from tests.support.fp8 import add_operand, current, delayed, draws, fill, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


# -- stale -------------------------------------------------------------------------------------------------------------


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


# -- held down ---------------------------------------------------------------------------------------------------------


def spiky(binades: float) -> Callable[[int], np.ndarray]:
    """A spike at step 5."""
    return lambda s: draws(1)(s) * (2.0**binades if s == 5 else 1.0)


def long_history() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(spiky(14.0), 1024)})


def forgotten_spike() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(spiky(14.0), 4)})


def small_spike() -> Training:
    """Six binades: E4M3 has them to spare."""
    return in_fp8(24, {(UP, "input"): delayed(spiky(6.0), 1024)})


def shrinking() -> Training:
    """Gradients that shrink by half every five steps, with a history of 16: three binades of padding."""
    return in_fp8(24, {(UP, "input"): delayed(lambda s: draws(2)(s) * 2.0 ** (-s / 5.0), 16)})


def sparse_zeros() -> Training:
    return in_fp8(24, {(UP, "input"): delayed(lambda s: np.maximum(draws(3)(s), 0.0), 1024)})


# -- an amax that is none ----------------------------------------------------------------------------------------------


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


# -- left in -----------------------------------------------------------------------------------------------------------


def louder(run: Training, module: str | None = None) -> Training:
    """The outputs of a module, or of all, are 2^20 times as large."""

    def change(row: dict[str, Any]) -> None:
        row.update(amax=row["amax"] * 2.0**20, exp_lo=row["exp_lo"] + 20, sum_sq=row["sum_sq"] * 2.0**40)

    return run.change(change, kind="output", module=module)


def scales_left_in() -> Training:
    return louder(in_fp8(), UP)


def loud_everywhere() -> Training:
    """A residual stream of that size: the module may add it to its product."""
    return louder(in_fp8())


def loud_by_itself() -> Training:
    """The scales are too small to explain it: the module multiplies by something else."""
    large = {(UP, name): current(lambda s, i=i: draws(i)(s) * 2e3) for i, name in enumerate(("input", "weight"))}
    return louder(in_fp8(casts=large), UP)


FIRING = {
    "left_in": Sample(
        scales_left_in, module=UP, kind="output", cause="left-in", says=("not divided out", "limit 64 times that"),
    ),
    "short_history": Sample(
        short_history, module=UP, kind="fp8_operand", cause="stale", severity="warning",
        says=("a history of 1 step", "limit 10 %", "binades above 448"), evidence={"recipe": "delayed:1:max"},
    ),
    "growing": Sample(
        growing, module=UP, cause="stale", severity="error", says=("stale on 100 % of the steps",)
    ),
    "long_history": Sample(
        long_history, module=UP, kind="fp8_operand", cause="held-down", severity="warning",
        says=("spike of step 5", "limit 25 %", "binades of float8_e4m3fn unused"), evidence={"spike_step": 5},
    ),
    "epsilon": Sample(
        epsilon, step=1, module="head", kind="fp8_operand", cause="invalid-amax", severity="warning",
        says=("amax was 0 at step 0", "clipped"),
    ),
    "infinite": Sample(infinite, step=0, module="head", cause="invalid-amax", says=("inf", "NaN or infinite")),
    "poisoned_history": Sample(
        poisoned_history, step=4, module=UP, cause="invalid-amax", says=("infinite", "became zero")
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        *(always_too_large, grows_from_zero, long_enough, current_scaling, heavy_tails, one_spike),
        *(most_recent_of_a_steady_tensor, forgotten_spike, small_spike, shrinking, sparse_zeros),
        *(kept, frozen, large_scale, loud_everywhere, loud_by_itself),
    )
}
