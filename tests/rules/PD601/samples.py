"""Activations near the end of their format."""

from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.training import Training, normal


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


def in_bf16() -> Training:
    return amax(lambda s: 40_000.0 + 400 * (s % 5), dtype="bfloat16")


def scaled_gradient() -> Training:
    """The loss scaler keeps gradients there on purpose."""
    return amax(lambda s: 60_000.0 - 400 * (s % 5), kind="grad_output")


FIRING = {
    "at_sixty_percent": Sample(
        lambda: amax(lambda s: 40_000.0 + 400 * (s % 5)), module="head", kind="output", severity="warning",
        says=("62 %", "65504", "limit"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (a_binade_and_more_below, one_large_batch, a_mask, scores_on_a_mask, finfo_min, in_bf16, scaled_gradient)
}
