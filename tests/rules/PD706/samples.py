"""Casts."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used, with_scans
from tests.support.training import Training


def flush(**changes: Any) -> dict[str, Any]:
    measured = {"lost": 1.0, "flushed": 256, "clipped": 0, "nonzero": 256, "amax": 1e-8, "amin_nonzero": 1e-9}
    return fact("cast", "_to_copy.default", **{"from": "float32", "to": "float16", "numel": 256, **measured, **changes})


def integers(**changes: Any) -> dict[str, Any]:
    measured = {"from": "int64", "to": "bfloat16", "numel": 1000, "distinct_before": 1000, "distinct_after": 507}
    return fact("cast", "_to_copy.default", **{"dtype": "bfloat16", **measured, "largest": 999.0, **changes})


def features(**changes: Any) -> dict[str, Any]:
    """Longitudes of one town, in BF16."""
    measured = {"from": "float32", "to": "bfloat16", "numel": 512, "features": 4, "features_rounded": 2, "feature": 0}
    worst = {"spread_lost": 0.99, "mean": -122.4, "deviation": 0.15, "values_before": 128, "values_after": 2}
    place = {"phase": "script", "dtype": "bfloat16"}
    return {**fact("cast", "_to_copy.default", **{**measured, **worst, **place, **changes}), "root": "", "module": ""}


def small_beside_the_spread() -> Training:
    return scanned(features(spread_lost=0.12, features_rounded=1, values_after=40))


def slowest_cosine() -> Training:
    """One feature of an embedding of time, cast by autocast in the layer that reads it."""
    inside = features(phase="forward", features=32, features_rounded=3, feature=30, mean=1.0, deviation=1e-3)
    return scanned({**inside, "root": "GPT#0", "module": "blocks.0.attn"})


def probabilities() -> Training:
    """Nearly all of a sharp softmax is flushed, and weighs nothing."""
    return scanned(flush(lost=1e-5, flushed=250))


#: A fiftieth of what it is added to.
ENDS = {"effect": 0.02, "fed": used("add.Tensor")}


def small_bias() -> Training:
    """Flushed whole on every step, and next to nothing beside the activations it is added to."""
    return scanned(flush(effect=1e-3, fed=used("addmm.default")))


def warm_up() -> Training:
    """A layer that began at zero is flushed after the first step, and has grown by the next scan."""
    return with_scans(scanned(flush(**ENDS), steps=(1,)), 8)


def indices(**changes: Any) -> dict[str, Any]:
    """Item numbers that were packed into an FP16 tensor."""
    measured = {"from": "float16", "to": "int64", "distinct_before": 1497, "distinct_after": 188, "least": 10000.0}
    return integers(**{**measured, "largest": 11496.0, "read_by": used("embedding.default"), **changes})


def halved_batch(times: int = 2, numel: int = 1000) -> Training:
    """Item numbers that one line casts to BF16 with the rest of the batch, and two lines read back."""
    cast = integers(largest=1999.0, times=times)
    read = {"from": "bfloat16", "least": 0.0, "largest": 1999.0, "distinct_before": 2000, "distinct_after": 600}
    inputs = indices(**read, numel=1000)
    labels = indices(**{**read, "largest": 1998.0}, numel=numel)
    return scanned(labels | {"line": 61}, inputs | {"line": 60}, cast)


def few_missing() -> Training:
    return scanned(indices(distinct_before=2100, distinct_after=2073, least=0.0, largest=2099.0))


def few_collide() -> Training:
    return scanned(integers(distinct_after=900))


FIRING = {
    "positions": Sample(
        lambda: scanned(indices(distinct_before=401, distinct_after=329, least=0.0, largest=400.0)), 0,
        severity="warning", says=("only 329 of the 401 integers from 0 to 400 can occur", "limit 10 %"),
    ),
    "indices": Sample(
        lambda: scanned(indices()), 0, "blocks.0.attn", severity="warning",
        says=("only 188 of the 1,497 integers from 10,000 to 11,496 can occur", "used as indices by embedding"),
    ),
    "halved_batch": Sample(
        halved_batch, 0, "blocks.0.attn", severity="warning",
        says=("cast from int64 to bfloat16", "1,000 integers become 507 different numbers at model.py:42"),
    ),
    "gradients": Sample(
        lambda: scanned({**flush(phase="optimizer"), "root": "", "module": ""}), 0, severity="warning",
        says=("in the code after the backward pass",),
    ),
    "flush": Sample(
        lambda: scanned(flush()), 0, "blocks.0.attn", severity="warning", says=("100 % of its magnitude", "256 of 256"),
    ),
    "attention": Sample(
        lambda: scanned(flush(to="float8_e4m3fn", amax=4.9e-4, amin_nonzero=4.8e-4, bulk=2.0**-12, **ENDS)), 0,
        severity="warning", says=("makes up 2 % of the result of add at model.py:44 (limit 0.39 %)",),
    ),
    "on the last scanned step": Sample(
        lambda: scanned(flush(**ENDS), steps=(5,)), 5, severity="warning", says=("Seen on 1 scanned step",),
    ),
    "longitudes": Sample(
        lambda: scanned(features()), 0, severity="warning",
        says=("2 values left of feature 0", "128 different values 2 are left", "In 2 of 4 features it is", "25 %"),
    ),
    "clip": Sample(
        lambda: scanned(flush(to="float8_e4m3fn", lost=0.7, flushed=0, clipped=200, amax=9000.0)), 0,
        severity="warning", says=("200 clipped",),
    ),
    "integers": Sample(
        lambda: scanned(integers()), 0, severity="warning", says=("1,000 integers become 507 different numbers",),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (probabilities, few_collide, few_missing, small_bias, warm_up, small_beside_the_spread, slowest_cosine)
}
