"""Gradients reduced over ranks in another format than their own."""

from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, normal


def reduced(dtype: str | None, ranks: int, hook: str | None = None, wrapper: str = "DistributedDataParallel") -> Any:
    """The usual facts, of a model in such a wrapper."""
    reduction = {"wrapper": wrapper, "ranks": ranks, "hook": hook, "dtype": dtype}
    return {**FACTS, "roots": [{**r, "reduction": reduction} for r in FACTS["roots"]]}


def gradients(sigma: float, facts: Any, weight_dtype: str = "float32") -> Training:
    """The head's gradient on each rank has this size."""
    run = Training(facts=facts, weight_dtype=weight_dtype)
    return run.change(lambda r: r.update(normal(sigma)), kind="weight_grad", module="head")


def fp16(sigma: float, ranks: int) -> Training:
    return gradients(sigma, reduced("float16", ranks, "fp16_compress_hook"))


def after_the_scale() -> Training:
    """Gradients of order 1 survive a division by 64."""
    return fp16(1.0, 64)


def few_ranks() -> Training:
    """What FP16 holds, divided by four."""
    return fp16(1e-4, 4)


def in_bf16() -> Training:
    """BF16 has FP32's range."""
    return gradients(1e-9, reduced("bfloat16", 64, "bf16_compress_hook"))


def in_fp32() -> Training:
    return gradients(1e-9, reduced(None, 1024))


def sharded_in_fp32() -> Training:
    return gradients(1e-9, reduced("float32", 64, wrapper="fully_shard"))


def overflows_from_the_first_step() -> Training:
    """No step is healthy: the first update has already replaced the weights by NaN."""
    run = fp16(1e5, 8)
    for step, rows in run.tensors.items():
        run.tensors[step] = rows if step == 0 else []
    return run.poison(0, "weight_grad_step", "head", nan=3)


FIRING = {
    "overflows_from_the_first_step": Sample(
        overflows_from_the_first_step, module="head", severity="error", weighed_by=("PD1",),
        says=("is beyond 65504", "infinities or NaN"),
    ),
    "small_gradients": Sample(
        lambda: fp16(2.0**-20, 64), module="head", kind="weight_grad", severity="warning",
        says=("fp16_compress_hook (float16)", "division by 64", "limit 4 %"),
    ),
    "large_gradients": Sample(
        lambda: fp16(1e5, 8), module="head", severity="warning", says=("beyond 65504", "overflows"),
    ),
    "sharded": Sample(
        lambda: gradients(2.0**-22, reduced("float16", 64, wrapper="FullyShardedDataParallel")),
        module="head", severity="warning", says=("division by 8",),
    ),
    "many_ranks": Sample(
        lambda: gradients(1e-3, reduced("bfloat16", 512, "bf16_compress_hook")),
        module=None, kind="weight_grad", severity="info", rank=None, bare=True, says=("stalls at 256",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (after_the_scale, few_ranks, in_bf16, in_fp32, sharded_in_fp32)}
