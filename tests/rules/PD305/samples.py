"""FP16 without a scaler: gradients among the subnormals, and gradients that are not."""

from tests.support.samples import Sample
from tests.support.training import Training, normal


def gradients(sigma: float, *, dtype: str = "float16", scale: float | None = None) -> Training:
    run = Training(dtype=dtype, scale=scale)
    return run.change(lambda r: r.update(normal(sigma, "float16")), kind="grad_output")


def of_order_one() -> Training:
    return gradients(1.0)


def scaled() -> Training:
    return gradients(6e-4, scale=1024.0)


def in_bf16() -> Training:
    return gradients(6e-7, dtype="bfloat16")


FIRING = {
    "few_bits": Sample(lambda: gradients(8e-7), kind="grad_output", severity="warning", says=("limit 25 %", "of 11")),
    "half_of_the_bits": Sample(lambda: gradients(4e-6), kind="grad_output", severity="warning", says=("of 11",)),
    "enough_bits": Sample(lambda: gradients(1.2e-5), kind="grad_output", severity="info"),
}
HEALTHY = {f.__name__: f for f in (of_order_one, scaled, in_bf16)}
