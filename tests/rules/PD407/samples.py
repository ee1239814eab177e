"""Embeddings, norms, routers and logits in FP8."""

from tests.support.fp8 import add_operand, current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import FACTS, Training, histogram, normal, tensor


def logits(sigma: float) -> Training:
    run = add_operand(in_fp8(), "head", "input", current(draws(1)))
    add_operand(run, "head", "weight", current(draws(2)))
    return run.change(lambda row: row.update(normal(sigma)), kind="output", module="head")


def loud_logits() -> Training:
    return logits(12.0)


def quiet_logits() -> Training:
    return logits(2.0)


def results(mean: float) -> Training:
    """What the model returns is cast, in a layer of any name, and varies by 1 around ``mean``."""
    draw = draws(9)
    values = lambda s: draw(s) + mean  # noqa: E731
    run = add_operand(in_fp8(), "blocks.0.mlp.down", "cast.0", current(values))
    for step, rows in run.tensors.items():
        seen = {"name": "", "module_class": "GPT", "shape": [32, 256], **histogram(values(step))}
        rows.insert([r["kind"] for r in rows].index("loss"), tensor(step, "output", "", None, dtype="float32", **seen))
    return run


def results_around_twenty() -> Training:
    return results(20.0)


def results_around_zero() -> Training:
    return results(0.0)


def norm_gain() -> Training:
    return add_operand(in_fp8(), "norm", "weight", current(draws(4)))


def blocks_only() -> Training:
    return in_fp8()


def gated_product() -> Training:
    """A layer that is called gate, and no experts beside it."""
    run = add_operand(in_fp8(), "blocks.0.mlp.down", "input", current(draws(6)))
    return run.change(lambda r: r.update(module="blocks.0.mlp.gate"), kind="fp8_operand", module="blocks.0.mlp.down")


def expert_gate() -> Training:
    """A layer that is called gate, among experts."""
    run = gated_product()
    roots = [{**FACTS["roots"][0]}]
    roots[0]["modules"] = [*roots[0]["modules"], {"name": "blocks.0.mlp.gate", "class": "Linear"},
                           {"name": "blocks.0.mlp.experts", "class": "ModuleList"}]  # fmt: skip
    run.facts = {**FACTS, "roots": roots}
    return run


FIRING = {
    "loud_logits": Sample(
        loud_logits, module="head", kind="fp8_operand", severity="warning", says=("nats", "limit 0.01")
    ),
    "quiet_logits": Sample(quiet_logits, module="head", severity="info", says=("harmless so far",)),
    "expert_gate": Sample(expert_gate, module="blocks.0.mlp.gate", severity="info", says=("a router",)),
    "results_around_twenty": Sample(
        results_around_twenty, module="blocks.0.mlp.down", kind="fp8_operand", severity="warning",
        says=("the model's results", "of their variance (limit 2 %)"),
    ),
    "norm_gain": Sample(norm_gain, module="norm", severity="info", says=("a norm", "harmless")),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (blocks_only, gated_product, results_around_zero)}
