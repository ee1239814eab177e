"""Clipping under a loss scale, in both orders."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training


def clipped(*, early: bool | None, norm: float = 0.5, scale: float | None = 8192.0) -> Training:
    run = Training(dtype="float16" if scale else "float32", scale=scale)
    run.facts = {**FACTS, "scalers": [{"class": "GradScaler", "enabled": True}]} if scale else FACTS
    for row in run.step_rows.values():
        row.update(clip_norm=1.0, clipped_before_unscale=early, grad_norm=norm)
    return run


def two_optimizers() -> Training:
    """Only one of them is unscaled before the norm of all gradients is taken."""
    run = clipped(early=True)
    run.facts = {**run.facts, "optimizers": [{**FACTS["optimizers"][0], "name": f"AdamW#{i}"} for i in range(2)]}
    return run


def by_hand(*, early: bool | None) -> Training:
    """No scaler; the steps between samples show no order."""
    run = clipped(early=early)
    run.facts = FACTS
    for step, row in run.step_rows.items():
        row.update(clipped_before_unscale=early if step % 2 == 0 else None)
    return run


def divided_first() -> Training:
    return by_hand(early=False)


def of_unknown_order() -> Training:
    return by_hand(early=None)


def unscaled_first() -> Training:
    return clipped(early=False)


def without_a_scaler() -> Training:
    return clipped(early=None, scale=None)


FIRING = {
    "bites": Sample(
        lambda: clipped(early=True), 0, kind=None, bare=True,
        says=("0.000122", "divided by 4.1e+03", "divided by 1", "limit"),
    ),
    "by_hand": Sample(
        lambda: by_hand(early=True), 0, kind=None, bare=True,
        says=("On 6 sampled steps (100 %", "0.000122"),
    ),
    "two_optimizers": Sample(two_optimizers, 0, kind=None, bare=True, says=("There are 2 optimizers",)),
    "tiny_gradients": Sample(lambda: clipped(early=True, norm=1e-6), 0, kind=None, severity="warning", bare=True),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (unscaled_first, without_a_scaler, divided_first, of_unknown_order, Training)}
