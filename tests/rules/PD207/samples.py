"""Epsilons that decide."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, used, with_scans
from tests.support.training import Training, normal


def floor(**changes: Any) -> dict[str, Any]:
    measured = {
        "constant": 1e-5,
        "decided": 250,
        "nonzero": 256,
        "median": 1e-9,
        "wrong": 240,
        "of": 256,
        "seen": 316.0,
    }
    followed = {"effect": 0.5, "fed": used("mul.Tensor")}
    return fact("floor", "add.Tensor", dtype="float32", read_by=used("rsqrt.default"), **{
        **measured, "exact": 31623.0, **followed, **changes})  # fmt: skip


def by_hand(**changes: Any) -> dict[str, Any]:
    """A line of a hand-written optimizer: no module, no effect."""
    made = floor(phase="optimizer", effect=None, fed=None, **changes)
    return {**made, "root": "", "module": "", "code": "p -= lr * m / (v.sqrt() + 1e-5)"}


def yogi() -> Training:
    """An epsilon of 1e-3 at a learning rate of 0.01, for weights of 0.02."""
    run = scanned(by_hand(constant=1e-3, median=1e-5))
    for row in run.step_rows.values():
        row["lr"] = 1e-2
    return run.change(lambda r: r.update(normal(0.02)), kind="weight")


def near() -> Training:
    """An optimizer's epsilon that halves the steps."""
    return scanned(by_hand(constant=1e-5, median=4e-6))


def from_scratch() -> Training:
    """Targets of an untrained detector: tiny at first, and no longer on half of the scans."""
    return with_scans(scanned(floor(), steps=(0, 1)), 4, 8)


def torchs() -> Training:
    """The epsilon of torch's own Adam, which PD503 is about."""
    return scanned({**by_hand(), "code": "optimizer.step()"})


def few() -> Training:
    return scanned(floor(wrong=100, effect=0.1))


def diluted() -> Training:
    return scanned(floor(effect=0.01))


def first_steps() -> Training:
    """A layer that began near zero, and has grown by the next scans."""
    return with_scans(scanned(floor(), steps=(0, 1)), 4, 8, 9)


def nothing_found() -> Training:
    return scanned()


FIRING = {
    "few-that-count": Sample(
        lambda: scanned(floor(wrong=100)), 0, "blocks.0.attn", severity="warning",
        says=("39 %, limit 50 %, or 25 % of what they feed",),
    ),
    "variance": Sample(
        lambda: scanned(floor()), 0, "blocks.0.attn", severity="warning",
        says=("1e-05 decides 94 % of the results", "guards numbers of 1e-09", "316 instead of 3.162e+04"),
    ),
    "by-hand": Sample(lambda: scanned(by_hand()), 0, severity="warning", says=("the code after the backward pass",)),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (diluted, few, first_steps, from_scratch, near, nothing_found, torchs, yogi)}
