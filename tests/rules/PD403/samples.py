"""E4M3 for gradients."""

import numpy as np

from precdoctor.numerics.formats import E4M3FN, E5M2
from tests.support.fp8 import add_operand, current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training

UP = "blocks.0.mlp.up"


SHAPE = (256, 256)


def spread_rows(step: int) -> np.ndarray:
    """A quarter of one token's gradient is 2^14.5 times that of the others, which hold 4 % of the magnitude."""
    x = draws(0, SHAPE)(step)
    x[step % SHAPE[0], :64] *= 2.0**14.5
    return x


def per_tensor() -> Training:
    return add_operand(in_fp8(), "head", "grad_output", current(spread_rows), E4M3FN)


def weightless() -> Training:
    """What is flushed is far below the rounding of the rest."""
    wide = lambda s: np.exp(3.0 * draws(1)(s))  # noqa: E731
    return add_operand(in_fp8(), "head", "grad_output", current(wide), E4M3FN)


def two_populations(step: int) -> np.ndarray:
    """Every other sample's gradient is 2^-25 of its neighbour's: nothing in the sum, and all that it has to say."""
    x = draws(3, SHAPE)(step)
    x[::2] *= 2.0**-25
    return x


def whole_rows() -> Training:
    return add_operand(in_fp8(), "head", "grad_output", current(two_populations), E4M3FN)


def whole_rows_under_sgd() -> Training:
    """Small gradients make small steps, flushed or not."""
    run = whole_rows()
    run.facts = {
        **run.facts,
        "optimizers": [{"name": "SGD#0", "class": "SGD", "intended_update": "exact", "groups": []}],
    }
    return run


def in_e5m2() -> Training:
    return add_operand(in_fp8(), "head", "grad_output", current(spread_rows, E5M2), E5M2)


def narrow_in_e4m3() -> Training:
    return add_operand(in_fp8(), "head", "grad_output", current(draws(2)), E4M3FN)


def scaled_per_block() -> Training:
    """No scale is known: blocks have their own. What they flush is not one scale's fault."""

    def cast(step: int) -> tuple[np.ndarray, None]:
        x = spread_rows(step).reshape(-1, 32)
        return (x * (448.0 / np.abs(x).max(axis=1, keepdims=True))).reshape(SHAPE), None

    return add_operand(in_fp8(), "head", "grad_output", cast, E4M3FN)


FIRING = {
    "per_tensor": Sample(
        per_tensor, module="head", kind="fp8_operand", severity="warning", says=("E4M3", "E5M2", "limit 4 %")
    ),
    "whole_rows": Sample(
        whole_rows,
        module="head",
        severity="warning",
        says=("50 % of its blocks", "limit 25 %", "would have used it"),
    ),
}
HEALTHY = {f.__name__: f for f in (weightless, whole_rows_under_sgd, in_e5m2, narrow_in_e4m3, scaled_per_block)}
