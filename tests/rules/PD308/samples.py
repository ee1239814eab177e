"""FP16 gradients before and after the loss scale is taken out."""

import numpy as np

from tests.support.samples import Sample
from tests.support.training import NUMEL, Row, Training, histogram

SCALE = 4096.0


def divided(sigma: float, *, given: str = "float16", clip: float | None = None) -> Training:
    """Gradients of this standard deviation once unscaled, in the format they are given to the optimizer in."""
    scaled = (np.random.default_rng(2).normal(0.0, sigma * SCALE, NUMEL)).astype(np.float16)
    after = (scaled.astype(np.float32) / np.float32(SCALE)).astype(given).astype(np.float32)
    run = Training(weight_dtype="float16", scale=SCALE)

    def change(row: Row) -> None:
        values = {"weight_grad": scaled.astype(np.float32), "weight_grad_step": after}.get(row["kind"])
        if values is not None:
            row.update(histogram(values), dtype=given if row["kind"] == "weight_grad_step" else "float16")

    run.change(change)
    for row in run.step_rows.values():
        row["clip_norm"] = clip
    return run


def in_fp32() -> Training:
    return divided(3e-8, given="float32")


def large_enough() -> Training:
    return divided(1e-3)


def clipped() -> Training:
    """Clipping makes gradients smaller as well; who flushed them is not known."""
    return divided(3e-8, clip=1.0)


FIRING = {
    "third": Sample(lambda: divided(8e-8), kind="weight_grad_step", says=("4096", "limit 4 %", "2.98e-08")),
    "some": Sample(lambda: divided(4e-7), severity="warning"),
}
HEALTHY = {f.__name__: f for f in (in_fp32, large_enough, clipped)}
