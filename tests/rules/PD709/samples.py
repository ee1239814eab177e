"""FP16 on devices that have BF16, and on those that do not."""

from collections.abc import Sequence
from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, normal

A100 = {"type": "cuda", "name": "NVIDIA A100", "capability": [8, 0]}
V100 = {"type": "cuda", "name": "NVIDIA V100", "capability": [7, 0]}
DOWN = "blocks.0.mlp.down"


def scaled(skipped: Sequence[int] = (), steps: int = 60, dtype: str = "float16", **facts: Any) -> Training:
    """Autocast under a scaler that skips these steps, each at another scale."""
    stock = {
        "device": A100,
        "versions": {"cuda": "12.4"},
        "scalers": [{"class": "GradScaler", "growth_interval": 2000}],
    }
    run = Training(steps=steps, dtype=dtype, scale=1024.0, facts={**FACTS, **stock, **facts})
    run.scales([1024.0 * 0.5 ** sum(s < step for s in skipped) for step in range(steps)])
    for step, row in run.step_rows.items():
        row |= {"autocast_dtype": dtype, "growth_tracker": step - max((s for s in skipped if s < step), default=-1)}
    return run.skip(*skipped)


def near_the_end(run: Training) -> Training:
    """An activation reaches a third of FP16's largest number."""
    return run.change(lambda r: r.update(normal(6000.0, "float16")), kind="output", module=DOWN)


def wide_enough() -> Training:
    return scaled()


def calibrating() -> Training:
    """A fresh scaler comes down to its level."""
    return scaled(range(5))


def two_skips() -> Training:
    return scaled((20, 40))


def before_bf16() -> Training:
    return near_the_end(scaled(device=V100))


def rocm() -> Training:
    """Capabilities are counted differently there."""
    return near_the_end(scaled(versions={"cuda": None}))


def in_bf16() -> Training:
    run = Training(dtype="bfloat16", facts={**FACTS, "device": A100})
    for row in run.step_rows.values():
        row["autocast_dtype"] = "bfloat16"
    return run


FIRING = {
    "near_the_end": Sample(
        lambda: near_the_end(scaled()), module=DOWN, kind="output", severity="info", bare=True, rank=None,
        says=("limit 2^2)", "2^112 further"),
    ),
    "skipped": Sample(
        lambda: scaled((14, 29, 44)), severity="info", bare=True, rank=None, says=("3 of 60 steps", "limit 1 %")
    ),
    "on_a_cpu": Sample(
        lambda: near_the_end(scaled(device={"type": "cpu"})), severity="info", bare=True, rank=None
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (wide_enough, calibrating, two_skips, before_bf16, rocm, in_bf16)}
