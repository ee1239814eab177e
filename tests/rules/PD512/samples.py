"""Parts of a model whose gradients fall, end, and do so on purpose."""

from typing import Any

from tests.support.samples import Sample
from tests.support.training import Training, normal

PART = ("blocks.0.mlp.up", "blocks.0.mlp.down")


def fallen(
    factor: float = 2.0**-10, begin: int = 16, steps: int = 40, *, kinds: tuple[str, ...] = ("weight_grad_step",),
    modules: tuple[str, ...] = PART, scale: float | None = None, rate: float | None = None,
) -> Training:  # fmt: skip
    """From ``begin`` on the gradients of these modules are ``factor`` times as large; at ``rate``, less and less."""
    run = Training(steps=steps, scale=scale)
    for step in range(begin, steps):
        values: dict[str, Any] = normal(max(factor, rate ** (step - begin)) if rate else factor)
        for kind in kinds:
            for module in modules:
                run.change(lambda r, values=values: r.update(values), kind=kind, module=module, step=step)
    return run


def missing(begin: int = 16, *, made: bool = True, optimizers: int = 1) -> Training:
    """From ``begin`` on the optimizer is given no gradient of ``PART``, which the backward pass still makes, or not."""
    run = Training(steps=40)
    gone = ("weight_grad_step", "update") if made else ("weight_grad", "weight_grad_step", "update")
    for step, rows in run.tensors.items():
        run.step_rows[step]["optimizer"] = f"AdamW#{step % optimizers}"
        if step >= begin:
            run.tensors[step] = [r for r in rows if r["module"] not in PART or r["kind"] not in gone]
    return run


def next_optimizer() -> Training:
    """Another optimizer makes the steps from 16 on, and holds all weights but those of ``PART``."""
    run = missing(16)
    for step, row in run.step_rows.items():
        row["optimizer"] = f"AdamW#{int(step >= 16)}"
    return run


def a_head_trained_alone() -> Training:
    """The second phase trains the head; the rest is not frozen, so it has gradients."""
    run = next_optimizer()
    for step in range(16, 40):
        run.tensors[step] = [r for r in run.tensors[step] if r["kind"] != "weight_grad_step" or r["module"] == "head"]
    return run


def fallen_one_after_the_other() -> Training:
    """Two layers fall at different times; the last recorded step has no row of either."""
    run = fallen(begin=10, modules=PART[:1])
    for step in range(26, 40):
        run.change(lambda r: r.update(normal(2.0**-10)), kind="weight_grad_step", module=PART[1], step=step)
    run.tensors[39] = [r for r in run.tensors[39] if r["module"] not in PART or r["kind"] != "weight_grad_step"]
    return run


def fallen_vector_and_missing_matrices() -> Training:
    """The gain of a norm falls, which does not count, and two matrices are given no gradient, which does."""
    run = missing()
    run.change(lambda r: r.update(shape=[4096]), module="norm")
    for step in range(16, 40):
        run.change(lambda r: r.update(normal(2.0**-10)), kind="weight_grad_step", module="norm", step=step)
    return run


def pruned(share: float = 1.0) -> Training:
    """From step 16 on this share of the weights of ``PART`` is zero."""
    run = Training(steps=40)
    for step in range(16, 40):
        for module in PART:
            values: dict[str, Any] = normal(0.0) if share == 1.0 else {"zero": int(share * 4096)}
            run.change(lambda r, values=values: r.update(values), kind="weight", module=module, step=step)
    return run


def pruned_in_part() -> Training:
    return pruned(0.9)


def zero_until_trained() -> Training:
    """LoRA's B: zeros at first."""
    run = Training(steps=40)
    for step in range(4):
        run.change(lambda r: r.update(normal(0.0)), kind="weight", module=PART[0], step=step)
    return run


def a_vector_only() -> Training:
    run = fallen()
    run.change(lambda r: r.update(shape=[4096]), module=PART[0])
    run.change(lambda r: r.update(shape=[4096]), module=PART[1])
    return run


def half_of_a_percent() -> Training:
    return fallen(2.0**-6.5)


def everything_falls() -> Training:
    """A learning problem that is solved."""
    return fallen(modules=tuple(m for m in dict.fromkeys(r["module"] for r in Training(steps=1).tensors[0]) if m))


def zeros() -> Training:
    """The weight of the part's loss becomes 0."""
    return fallen(0.0, kinds=("weight_grad", "weight_grad_step"))


def for_a_while() -> Training:
    run = fallen(begin=16)
    for step in range(34, 40):
        run.change(lambda r: r.update(normal(1.0)), kind="weight_grad_step", step=step)
    return run


def at_the_very_end() -> Training:
    return fallen(begin=36)


def frozen() -> Training:
    return missing(made=False)


def another_optimizer() -> Training:
    """What is trained in turns, or in phases, by optimizers of its own."""
    return missing(optimizers=2)


FIRING = {
    "divided_after_backward": Sample(
        fallen, 16, module="blocks.0.mlp", kind="weight_grad_step", bare=True, severity="warning",
        says=("2^10 times smaller", "limit 2^7", "between `backward` and `step`"),
    ),
    "divided_by_the_loss_scale": Sample(
        lambda: fallen(2.0**-12, scale=4096.0), 16, module="blocks.0.mlp", kind="weight_grad_step", bare=True,
        severity="warning", says=("about the loss scale, 4,096",),
    ),
    "made_smaller_at_once": Sample(
        lambda: fallen(kinds=("weight_grad", "weight_grad_step")), 16, module="blocks.0.mlp",
        kind="weight_grad_step", bare=True, severity="warning", says=("The backward pass already makes less",),
    ),
    "annealed": Sample(
        lambda: fallen(2.0**-20, 10, 60, kinds=("weight_grad", "weight_grad_step"), rate=0.7), ...,
        module="blocks.0.mlp", kind="weight_grad_step", bare=True, severity="info", says=("hardly trains",),
    ),
    "left_out_by_the_next_optimizer": Sample(
        next_optimizer, 16, module="blocks.0.mlp", kind="weight_grad_step", bare=True, severity="warning",
        says=("missing at `step` of `AdamW#1`", "another optimizer makes the steps"),
    ),
    "pruned_whole": Sample(
        pruned, 16, module="blocks.0.mlp", kind="weight", bare=True, severity="warning",
        says=("all elements of 2 weights are zero", "limit 0"),
    ),
    "fallen_one_after_the_other": Sample(
        fallen_one_after_the_other, 26, module="blocks.0.mlp", kind="weight_grad_step", bare=True, severity="warning",
        says=("2 of 8 weights", "2^10 times smaller"),
    ),
    "fallen_vector_and_missing_matrices": Sample(
        fallen_vector_and_missing_matrices, 16, module="blocks.0.mlp", kind="weight_grad_step", bare=True,
        severity="warning", says=("2 of 8 weights", "missing at `step` of `AdamW#0`"),
    ),
    "no_longer_given": Sample(
        missing, 16, module="blocks.0.mlp", kind="weight_grad_step", bare=True, severity="warning",
        says=("2 of 8 weights", "is given no gradient of it any more"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        Training, a_vector_only, half_of_a_percent, everything_falls, zeros, for_a_while, at_the_very_end, frozen,
        another_optimizer, a_head_trained_alone, pruned_in_part, zero_until_trained,
    )
}  # fmt: skip
