"""Sums accumulated in half."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used
from tests.support.training import Training


def total(**changes: Any) -> dict[str, Any]:
    return fact("total", "add.Tensor", **{"dtype": "bfloat16", "error": 0.5, "terms": 1024, **changes})


def reduction(**changes: Any) -> dict[str, Any]:
    measured = {"dtype": "bfloat16", "error": 0.9, "error_of_magnitudes": 0.5, "terms": 4096.0}
    return fact("reduction", "embedding_dense_backward.default", **{**measured, "phase": "backward", **changes})


def rounding() -> Training:
    """Residuals of 32 layers."""
    return scanned(total(error=0.01, terms=32))


def cancels() -> Training:
    """A sum near zero of large terms, accumulated in FP32."""
    return scanned(reduction(error=0.3, error_of_magnitudes=1e-7))


def next_to_nothing() -> Training:
    """What is wrong is added to much larger numbers."""
    return scanned(total(effect=1e-3, fed=used("add.Tensor")))


def swamped(effect: float) -> Training:
    """An Euler integration of a position far from zero."""
    return scanned(total(error=0.007, terms=160, of_added=1.0, effect=effect, fed=used("sub.Tensor")))


def swamped_beside_others() -> Training:
    return swamped(0.01)


FIRING = {
    "swamped": Sample(
        lambda: swamped(0.9), 0, severity="warning", says=("loses 100 % of what is added", "limit 50 %"),
    ),
    "swamped, and little was added": Sample(
        lambda: swamped(0.03), 0, severity="warning", says=("loses 100 % of what is added", "3 % of the result of sub"),
    ),
    "total": Sample(
        lambda: scanned(total()), 0, "blocks.0.attn", severity="warning", says=("50 % off", "1,024 terms"),
    ),
    "embedding": Sample(
        lambda: scanned(reduction()), 0, "blocks.0.attn", severity="warning", says=("accumulated in bfloat16", "90 %"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (rounding, cancels, next_to_nothing, swamped_beside_others)}
