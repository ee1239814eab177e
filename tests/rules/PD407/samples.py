"""Embeddings, norms, routers and logits in FP8."""

from tests.support.fp8 import add_operand, current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import Training, normal


def logits(sigma: float) -> Training:
    run = add_operand(in_fp8(), "head", "input", current(draws(1)))
    add_operand(run, "head", "weight", current(draws(2)))
    return run.change(lambda row: row.update(normal(sigma)), kind="output", module="head")


def loud_logits() -> Training:
    return logits(12.0)


def quiet_logits() -> Training:
    return logits(2.0)


def norm_gain() -> Training:
    return add_operand(in_fp8(), "norm", "weight", current(draws(4)))


def blocks_only() -> Training:
    return in_fp8()


FIRING = {
    "loud_logits": Sample(
        loud_logits, module="head", kind="fp8_operand", severity="warning", says=("nats", "limit 0.01")
    ),
    "quiet_logits": Sample(quiet_logits, module="head", severity="info", says=("harmless so far",)),
    "norm_gain": Sample(norm_gain, module="norm", severity="info", says=("a norm", "harmless")),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (blocks_only,)}
