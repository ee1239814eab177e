"""Activations near the end of their format."""

from collections.abc import Callable

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Training, find, histogram, normal


def amax(of_step: Callable[[int], float], *, steps: int = 24, dtype: str = "float16", kind: str = "output") -> Training:
    """The head's output reaches ``of_step(step)``."""
    run = Training(steps=steps, dtype=dtype, scale=64.0)
    largest = normal(1.0)["amax"]
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == kind and row["module"] == "head":
                row.update(normal(of_step(step) / largest))
    return run


def a_binade_and_more_below() -> Training:
    return amax(lambda s: 30_000.0 - 10 * s)


def one_large_batch() -> Training:
    return amax(lambda s: 60_000.0 if s == 12 else 900.0)


def a_mask() -> Training:
    """One and the same number on all steps."""
    return amax(lambda _: 60_000.0)


def scores_on_a_mask() -> Training:
    """Attention scores of 15 added to finfo.min / 2."""
    return amax(lambda s: 40_000.0 + 15 * (s % 5))


def finfo_min() -> Training:
    run = amax(lambda s: 65_504.0 - 32 * s)
    return run.change(lambda r: r.update(at_max=40), kind="output", module="head")


def a_mask_behind_scores() -> Training:
    """Scores of 30 in FP32, and -60,000 in FP16 where they are masked."""
    return a_mask().change(lambda r: r.update(normal(30.0) | {"dtype": "float32"}), kind="output", module="norm")


def in_bf16() -> Training:
    return amax(lambda s: 40_000.0 + 400 * (s % 5), dtype="bfloat16")


def scaled_gradient() -> Training:
    """The loss scaler keeps gradients there on purpose."""
    return amax(lambda s: 60_000.0 - 400 * (s % 5), kind="grad_output")


def clamped(sigma: float) -> Training:
    """A clamp to 64512 and a cast to FP16, right behind a tensor of this standard deviation in FP32."""
    run = Training(steps=24)
    for rows in run.tensors.values():
        find(rows, "output", "norm").update(normal(sigma))
        values = np.clip(np.random.default_rng(9).normal(0.0, sigma, 4096), -64512.0, 64512.0)
        find(rows, "output", "head").update({"dtype": "float16"} | histogram(values))
    return run


FIRING = {
    "clamped_to_fit": Sample(
        lambda: clamped(1e5), module="head", kind="output", severity="warning",
        says=("clamped at 64512", "limit 1 %", "right before it"),
    ),
    "at_sixty_percent": Sample(
        lambda: amax(lambda s: 40_000.0 + 400 * (s % 5)), module="head", kind="output", severity="warning",
        says=("62 %", "65504", "limit"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        a_binade_and_more_below,
        one_large_batch,
        a_mask,
        a_mask_behind_scores,
        scores_on_a_mask,
        finfo_min,
        in_bf16,
        scaled_gradient,
    )
} | {"a_clamp_for_outliers": lambda: clamped(2.2e4)}
