"""Weight gradients that FP16 flushed, and zeros that were always there."""

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Training, find, histogram, normal


def gradients(sigma: float, *, zeros: int = 0) -> Training:
    """The gradient of the head's weight, computed in FP16, with so many zeros besides."""
    columns = normal(sigma, "float16") | {"dtype": "float16"}
    columns["zero"] += zeros
    columns["numel"] += zeros
    return Training().change(lambda r: r.update(columns), kind="weight_grad", module="head")


def widened() -> Training:
    """FP32 in the log, but computed under FP16 autocast: no element below 2^-24."""
    run = gradients(4e-8)
    for row in run.step_rows.values():
        row["autocast_dtype"] = "float16"
    return run.change(lambda r: r.update(dtype="float32"), kind="weight_grad", module="head")


def made_in_fp32() -> Training:
    """As small, but FP32 holds it."""
    run = Training()
    for row in run.step_rows.values():
        row["autocast_dtype"] = "float16"
    return run.change(lambda r: r.update(normal(4e-8)), kind="weight_grad", module="head")


def unused_rows() -> Training:
    return gradients(1e-3, zeros=40000)


def subnormal_but_there() -> Training:
    return gradients(2e-5)


def compressed(sigma: float = 1e-5, *, back: float = 1e-5, moving: bool = False) -> Training:
    """FP32 gradients of the head that a hook has rounded to multiples of 2^-16, or of a power of two that moves.

    Args:
        sigma: of the gradient before.
        back: of the gradient of the head's output.
        moving: another grid on every other step.
    """
    run = Training()
    for step, rows in run.tensors.items():
        grid = 2.0 ** -(16 + moving * (step % 2))
        values = np.round(np.random.default_rng(8).normal(0.0, sigma, 4096) / grid) * grid
        find(rows, "weight_grad", "head").update({"exp_lo": None, "exp_hist": None} | histogram(values))
        find(rows, "grad_output", "head").update(normal(back))
    return run


FIRING = {
    "compressed_by_a_hook": Sample(
        compressed, module="head", kind="weight_grad", says=("steps of 1.53e-05", "2^-16", "limit 4 %", "on its way")
    ),
    "half_flushed": Sample(lambda: gradients(4e-8), module="head", kind="weight_grad", says=("limit 4 %", "FP16")),
    "widened": Sample(widened, module="head", kind="weight_grad"),
    "a_tenth": Sample(lambda: gradients(2.5e-7, zeros=900), module="head", severity="warning", says=("other reasons",)),
}
HEALTHY = {f.__name__: f for f in (made_in_fp32, unused_rows, subnormal_but_there)} | {
    "whole_numbers_from_the_loss": lambda: compressed(back=1.0),
    "a_grid_that_moves": lambda: compressed(moving=True),
    "a_grid_far_below": lambda: compressed(1e-2),
}
