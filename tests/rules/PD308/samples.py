"""FP16 gradients before and after the loss scale is taken out."""

import numpy as np

from tests.support.samples import Sample
from tests.support.training import NUMEL, Row, Training, histogram

SCALE = 4096.0


def divided(
    sigma: float, *, given: str = "float16", by: str | None = None, clip: float | None = None, masked: float = 0.0
) -> Training:
    """Gradients of this standard deviation once unscaled, in the format they are given to the optimizer in.

    Args:
        by: the format they are divided in, if another one.
        masked: share of them that something else sets to zero after that.
    """
    rng = np.random.default_rng(2)
    scaled = (rng.normal(0.0, sigma * SCALE, NUMEL)).astype(np.float16)
    after = (scaled.astype(np.float32) / np.float32(SCALE)).astype(by or given).astype(np.float32)
    after[rng.random(NUMEL) < masked] = 0.0
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


def masked() -> Training:
    """A mask in FP32, on gradients all of which FP16 could hold."""
    return divided(1e-2, given="float32", masked=0.5)


FIRING = {
    "copied-to-fp32-after": Sample(
        lambda: divided(8e-8, given="float32", by="float16"),
        kind="weight_grad_step",
        says=("4096", "2.98e-08"),
    ),
    "all-of-it": Sample(lambda: divided(2e-9, given="float32", by="float16"), kind="weight_grad_step", says=("100 %",)),
    "third": Sample(lambda: divided(8e-8), kind="weight_grad_step", says=("4096", "limit 4 %", "2.98e-08")),
    "some": Sample(lambda: divided(4e-7), severity="warning"),
}
HEALTHY = {f.__name__: f for f in (in_fp32, large_enough, clipped, masked)}
