"""Casts."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned
from tests.support.training import Training


def flush(**changes: Any) -> dict[str, Any]:
    measured = {"lost": 1.0, "flushed": 256, "clipped": 0, "nonzero": 256, "amax": 1e-8, "amin_nonzero": 1e-9}
    return fact("cast", "_to_copy.default", **{"from": "float32", "to": "float16", "numel": 256, **measured, **changes})


def integers(**changes: Any) -> dict[str, Any]:
    measured = {"from": "int64", "to": "bfloat16", "numel": 1000, "distinct_before": 1000, "distinct_after": 507}
    return fact("cast", "_to_copy.default", **{"dtype": "bfloat16", **measured, "largest": 999.0, **changes})


def probabilities() -> Training:
    """Nearly all of a sharp softmax is flushed, and weighs nothing."""
    return scanned(flush(lost=1e-5, flushed=250))


def few_collide() -> Training:
    return scanned(integers(distinct_after=900))


FIRING = {
    "flush": Sample(
        lambda: scanned(flush()), 0, "blocks.0.attn", severity="warning", says=("100 % of its magnitude", "256 of 256"),
    ),
    "clip": Sample(
        lambda: scanned(flush(to="float8_e4m3fn", lost=0.7, flushed=0, clipped=200, amax=9000.0)), 0,
        severity="warning", says=("200 clipped",),
    ),
    "integers": Sample(
        lambda: scanned(integers()), 0, severity="warning", says=("1,000 integers become 507 different numbers",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (probabilities, few_collide)}
