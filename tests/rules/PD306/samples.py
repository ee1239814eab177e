"""Clipping under a loss scale, in both orders."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training


def clipped(*, early: bool | None, norm: float = 0.5, scale: float | None = 8192.0) -> Training:
    run = Training(dtype="float16" if scale else "float32", scale=scale)
    for row in run.step_rows.values():
        row.update(clip_norm=1.0, clipped_before_unscale=early, grad_norm=norm)
    return run


def two_optimizers() -> Training:
    """Only one of them is unscaled before the norm of all gradients is taken."""
    run = clipped(early=True)
    run.facts = {**FACTS, "optimizers": [{**FACTS["optimizers"][0], "name": f"AdamW#{i}"} for i in range(2)]}
    return run


def unscaled_first() -> Training:
    return clipped(early=False)


def without_a_scaler() -> Training:
    return clipped(early=None, scale=None)


FIRING = {
    "bites": Sample(
        lambda: clipped(early=True), 0, kind=None, bare=True,
        says=("0.000122", "divided by 4.1e+03", "divided by 1", "limit"),
    ),
    "two_optimizers": Sample(two_optimizers, 0, kind=None, bare=True, says=("There are 2 optimizers",)),
    "tiny_gradients": Sample(lambda: clipped(early=True, norm=1e-6), 0, kind=None, severity="warning", bare=True),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (unscaled_first, without_a_scaler, Training)}
