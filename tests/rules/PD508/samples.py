"""Weights and their master copies, from the same numbers and from others."""

import numpy as np

from tests.support.samples import Sample
from tests.support.training import NUMEL, Training, find, histogram, tensor

_VALUES = np.random.default_rng(2).normal(0.0, 0.02, NUMEL).astype(np.float32)


def in_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to eight significant bits, to nearest."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def trained(moves: float, *, copied: bool = True, from_step: int = 0) -> Training:
    """The head has a master, every element of which moves by ``moves`` away from zero per step."""
    run = Training()
    for step, rows in run.tensors.items():
        master = _VALUES + np.sign(_VALUES) * moves * step
        follows = copied or step < from_step
        find(rows, "weight", "head").update({**histogram(in_bf16(master if follows else _VALUES)), "dtype": "bfloat16"})
        rows.append(tensor(step, "master_weight", "head", len(rows), name="weight", dtype="float32"))
        rows[-1] |= histogram(master)
    return run


def set_alone(*steps: int) -> Training:
    """A few rows of the head are set before each of these steps, and the master is copied over them at its end."""
    run = trained(1e-3)
    for step in steps:
        values = in_bf16(_VALUES + np.sign(_VALUES) * 1e-3 * step)
        values[: NUMEL // 8] = in_bf16(0.5 * np.sign(_VALUES[: NUMEL // 8]))
        find(run.tensors[step], "weight", "head").update(histogram(values))
    return run


def set_once() -> Training:
    return set_alone(5)


def copied_back() -> Training:
    return trained(1e-3)


def too_small_to_show() -> Training:
    """The master moves by less than an ulp of BF16, and the weight does not: that is what masters are for."""
    return trained(1e-7, copied=False)


def no_masters() -> Training:
    return Training(weight_dtype="float32")


FIRING = {
    "never_copied": Sample(
        lambda: trained(1e-3, copied=False), module="head", kind="master_weight", step=11, bare=True,
        says=("bfloat16", "limit 1"),
    ),
    "loaded_later": Sample(
        lambda: trained(1e-3, copied=False, from_step=6), module="head", kind="master_weight", bare=True,
    ),
    "set_in_the_weight_alone": Sample(
        lambda: set_alone(3, 7), module="head", kind="master_weight", step=3, severity="warning",
        says=("2 recorded steps", "writes its master over that"), evidence={"undone_steps": 2},
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (set_once, copied_back, too_small_to_show, no_masters)}
