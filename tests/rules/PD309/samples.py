"""Gradients unscaled once, twice and not at all, clipped and accumulated."""

from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.training import Training, normal


def given(factor: Callable[[int], float], *, scale: float = 8192.0, clip: float | None = None) -> Training:
    """The optimizer gets this factor of the unscaled gradients, which are of RMS 0.01."""
    run = Training(dtype="float16", scale=scale)
    for step, row in run.step_rows.items():
        row.update(clip_norm=clip, clipped_before_unscale=None if clip is None else False)
        run.change(lambda r: r.update(normal(0.01 * scale)), kind="weight_grad", step=step)
        run.change(lambda r: r.update(normal(0.01 * factor(int(r["step"])))), kind="weight_grad_step", step=step)
    return run


def once() -> Training:
    return given(lambda _: 1.0)


def clipped() -> Training:
    """To a norm that is now and then a factor of the scale below what it was."""
    return given(lambda s: (0.5, 0.02, 1 / 8192, 0.003)[s % 4], clip=1.0)


def divided_by_the_micro_steps() -> Training:
    """Sixteen of them, and the scale is sixteen as well."""
    return given(lambda _: 1 / 16, scale=16.0)


def left_scaled() -> Training:
    """The learning rate has been divided instead."""
    return given(lambda _: 8192.0)


FIRING = {
    "twice": Sample(
        lambda: given(lambda _: 1 / 8192), 0, kind=None, bare=True, says=("unscaled twice", "8192", "0.000122", "limit")
    ),
}
HEALTHY = {f.__name__: f for f in (once, clipped, divided_by_the_micro_steps, left_scaled)}
