"""Scalers with nothing to scale."""

from tests.support.samples import Sample
from tests.support.training import Training


def scaler(dtype: str) -> Training:
    run = Training(dtype=dtype, scale=65536.0)
    for step, row in run.step_rows.items():
        row.update(growth_tracker=step, autocast_dtype=dtype if dtype != "float32" else None)
    return run


def in_fp16() -> Training:
    return scaler("float16")


def scale_by_hand() -> Training:
    """A constant written into the script is no scaler."""
    return Training(dtype="bfloat16", scale=65536.0)


FIRING = {
    "in_bf16": Sample(lambda: scaler("bfloat16"), severity="info", bare=True, says=("65536", "bfloat16")),
    "in_fp32": Sample(lambda: scaler("float32"), severity="info", bare=True),
    "hides_overflows": Sample(lambda: scaler("bfloat16").skip(5), 5, severity="warning", bare=True, says=("1 step",)),
}
HEALTHY = {f.__name__: f for f in (in_fp16, scale_by_hand, Training)}
