"""Variances as differences of moments."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used
from tests.support.training import Training


def difference(**changes: Any) -> dict[str, Any]:
    measured = {"dtype": "float32", "bits_lost": 24.7, "wrong": 250, "of": 256, "seen": 300.0, "exact": 0.05}
    return fact("cancellation", "sub.Tensor", **{**measured, "used_by": used("rsqrt.default"), **changes})


def bits_left() -> Training:
    return scanned(difference(bits_lost=12.0))


def constant_rows() -> Training:
    return scanned(difference(wrong=40))


def next_to_nothing() -> Training:
    """What is wrong is added to much larger numbers."""
    return scanned(difference(effect=1e-3, fed=used("add.Tensor")))


FIRING = {
    "float32": Sample(
        lambda: scanned(difference()), 0, "blocks.0.attn", severity="warning",
        says=("24 of 24 bits", "98 %", "300 where FP64 gives 0.05"),
    ),
    "bfloat16": Sample(
        lambda: scanned(difference(dtype="bfloat16", bits_lost=6.0)), 0, severity="warning", says=("6 of 8 bits",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (bits_left, constant_rows, next_to_nothing)}
