"""Gradients summed over micro-steps."""

from tests.support.samples import Sample
from tests.support.training import Training


def accumulated(micro_steps: int, dtype: str = "bfloat16") -> Training:
    run = Training(weight_dtype=dtype)
    for row in run.step_rows.values():
        row["micro_steps"] = micro_steps
    return run


def in_fp32() -> Training:
    return accumulated(4096, "float32")


def sixteen() -> Training:
    return accumulated(16)


def hundred_in_fp16() -> Training:
    return accumulated(100, "float16")


FIRING = {
    "stalled": Sample(lambda: accumulated(512), kind="weight_grad", severity="warning", says=("512", "256", "50%")),
    "two_bits": Sample(lambda: accumulated(64), severity="info", says=("limit 64", "2.0 bits")),
    "fp16": Sample(lambda: accumulated(2048, "float16"), severity="warning", says=("stall at 2,048",)),
}
HEALTHY = {f.__name__: f for f in (in_fp32, sixteen, hundred_in_fp16)}
