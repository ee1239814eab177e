"""Overflows that a later op hides."""

import math
from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used
from tests.support.training import Training

HIDDEN = {"affected": 64, "exact_amax": 90000.0, "exact_amin": 70000.0, "of": 256, "seen": 0.0, "exact": 0.9}
HIDDEN |= {"hidden_by": used("rsqrt.default"), "shown_by": used("mul.Tensor")}


def overflow(**changes: Any) -> dict[str, Any]:
    return fact("overflow", "mul.Tensor", **{**HIDDEN, "wrong": 64, **changes})


def in_float32() -> Training:
    """1e39 is beyond FP32, too: scale first."""
    return scanned(overflow(dtype="float32", exact_amax=1e39))


def single_element() -> Training:
    return scanned(overflow(wrong=1, of=100_000))


def nothing_found() -> Training:
    return scanned()


def not_scanned() -> Training:
    return Training()


def next_to_nothing() -> Training:
    """What is wrong is added to much larger numbers."""
    return scanned(overflow(effect=1e-3, fed=used("add.Tensor")))


FIRING = {
    "by-rsqrt": Sample(
        lambda: scanned(overflow()), 0, "blocks.0.attn", severity="warning",
        says=("rsqrt hides it", "25 % of the result", "model.py:42", "FP64 gives 0.9"),
    ),
    "float32": Sample(in_float32, 0, "blocks.0.attn", severity="warning", says=("1e+39",)),
    "layers-of-one-class": Sample(
        lambda: scanned(overflow(), overflow(module="blocks.1.attn", wrong=200, seen=math.inf)), 0, "blocks.1.attn",
        severity="warning", says=("in 2 modules", "78 %"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (single_element, nothing_found, not_scanned, next_to_nothing)}
