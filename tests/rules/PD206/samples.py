"""Underflows that wrong numbers are made of."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used, with_scans
from tests.support.training import Training


def underflow(**changes: Any) -> dict[str, Any]:
    flushed = {"affected": 256, "exact_amax": 2e-8, "exact_amin": 1e-10, "wrong": 200, "of": 256, "seen": 1e6}
    return fact("underflow", "mul.Tensor", **{**flushed, "exact": 1e4, "shown_by": used("rsqrt.default"), **changes})


def few() -> Training:
    return scanned(underflow(wrong=1))


def next_to_nothing() -> Training:
    """Wrong numbers that are added to much larger ones."""
    return scanned(underflow(effect=1e-3, fed=used("add.Tensor")))


def warm_up() -> Training:
    """A gate that began at zero, and has grown by the next scan."""
    return with_scans(scanned(underflow(effect=1.0, fed=used("mul.Tensor")), steps=(1,)), 8)


def nothing_found() -> Training:
    return scanned()


FIRING = {
    "variance": Sample(
        lambda: scanned(underflow()), 0, "blocks.0.attn", severity="warning",
        says=("flushes to zero", "of the result of rsqrt is wrong", "1e+06 where FP64 gives 1e+04"),
    ),
    "below-float32": Sample(
        lambda: scanned(underflow(dtype="float32", exact_amin=1e-50)), 0, severity="warning", says=("78 %",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (few, nothing_found, next_to_nothing, warm_up)}
