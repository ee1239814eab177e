"""Functions at their bound."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import Training


def closed(**changes: Any) -> dict[str, Any]:
    measured = {"function": "tanh", "closed": 240, "of": 256, "lost": 0.95, "channels": 0.6}
    return fact("closed", "tanh_backward.default", **{"phase": "backward", **measured, **changes})


def hard(**changes: Any) -> dict[str, Any]:
    return fact(
        "closed", "_softmax.default", **{"function": "softmax", "open": 1e-4, "of": 256, "distance": 12.0, **changes}
    )


def some() -> Training:
    return scanned(closed(lost=0.6, channels=0.3))


def learnt() -> Training:
    """Saturated late: not on the first scans."""
    return with_scans(scanned(closed(), hard(), steps=(8, 9)), 0, 1)


def near_later() -> Training:
    """A gate that has learnt to close, but for a last bit of slope."""
    return with_scans(scanned(closed(near=True, channels=1.0), steps=(8, 9)), 0, 1)


def sharp() -> Training:
    return scanned(hard(open=0.05))


def rounded(zero_gradients: int) -> Training:
    return scanned(closed(function="round", lost=1.0, channels=1.0, zero_gradients=zero_gradients))


def straight_through() -> Training:
    """The gradient takes another way."""
    return rounded(0)


def nothing_found() -> Training:
    return scanned()


def twice(**changes: Any) -> dict[str, Any]:
    measured = {"function": "softmax", "again": True, "of": 80, "classes": 5}
    told = fact("closed", "_log_softmax.default", **{"phase": "loss", **measured, **changes})
    return {**told, "root": "", "module": ""}


def without_log(**changes: Any) -> dict[str, Any]:
    measured = {"function": "softmax", "without_log": True, "of": 640}
    told = fact("closed", "nll_loss_forward.default", **{"phase": "loss", **measured, **changes})
    return {**told, "root": "", "module": ""}


def twice_on_one_step() -> Training:
    """As a metric beside the loss."""
    return with_scans(scanned(twice(), steps=(0,)), 1, 8)


FIRING = {
    "softmax-twice": Sample(
        lambda: scanned(twice()), 0, None, severity="warning",
        says=("cross_entropy is given probabilities", "cannot fall below 0.90", "5 classes"),
    ),
    "sigmoid-twice": Sample(
        lambda: scanned(twice(function="sigmoid", classes=2)), 0, None, severity="warning",
        says=("binary_cross_entropy_with_logits is given", "below 0.31"),
    ),
    "without-log": Sample(
        lambda: scanned(without_log()), 0, None, severity="warning",
        says=("nll_loss is given probabilities without their logarithm", "-1 at best"),
    ),
    "divergence-without-log": Sample(
        lambda: scanned(without_log(loss="kl_div")), 0, None, severity="warning",
        says=("kl_div is given probabilities without their logarithm", "whatever the target is"),
    ),
    "closed-later": Sample(
        lambda: with_scans(scanned(closed(channels=0.95), steps=(8, 9)), 0, 1), 8, "blocks.0.attn", severity="warning",
        says=("95 % of the channels",),
    ),
    "in-the-loss-later": Sample(
        lambda: with_scans(scanned({**closed(channels=1.0, zero_gradients=4), "module": ""}, steps=(8, 9)), 0),
        8, "", severity="warning", says=("tanh",),
    ),
    "round": Sample(lambda: rounded(4), 0, severity="warning", says=("round in `blocks.0.attn` has no slope",)),
    "tanh": Sample(
        lambda: scanned(closed()), 0, "blocks.0.attn", severity="warning",
        says=("tanh in `blocks.0.attn` is at its bound: 95 % of the gradient ends there", "60 % of the channels"),
    ),
    "channels": Sample(
        lambda: scanned(closed(lost=0.001)), 0, severity="warning",
        says=("all of the gradient of 60 % of its channels ends there",),
    ),
    "near": Sample(lambda: scanned(closed(near=True)), 0, severity="warning", says=("next to nothing",)),
    "clamp": Sample(lambda: scanned(closed(function="clamp", channels=0.0)), 0, severity="warning", says=("clamp",)),
    "softmax": Sample(
        lambda: scanned(hard()), 0, severity="warning", says=("a hard choice from the first step", "12 above the next"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (learnt, nothing_found, near_later, straight_through, sharp, some, twice_on_one_step)}
