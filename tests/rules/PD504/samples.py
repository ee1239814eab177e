"""Updates against the weights they change."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, normal


def updates(sigma: float, until: int = 12, steps: int = 12) -> Training:
    """Updates of the head (weights have RMS 1) up to step ``until``."""
    run = Training(steps=steps)
    for step, rows in run.tensors.items():
        for row in rows:
            if step < until and row["kind"] == "update" and row["module"] == "head":
                row.update(normal(sigma))
    return run


def thrown_off(first: float = 0.8, loss: float = 9.0, steps: int = 12) -> Training:
    """Replaced in its first steps only, and the loss goes up behind them."""
    run = updates(first, until=3, steps=steps)
    for step, row in run.step_rows.items():
        row.update(loss=3.0 if step == 0 else loss)
    return run


def diverges(factor: float = 1.5) -> Training:
    """Plain SGD above the stable rate: half as much gradient again on every step, and so the loss."""
    settings = {"lr": 0.1, "momentum": 0.0, "nesterov": False}
    facts = {**FACTS, "optimizers": [{"name": "SGD#0", "class": "SGD", "groups": [settings]}]}
    run = Training(facts=facts)
    run.change(lambda r: r.update(normal(0.9)), kind="update", module="head")
    for step, row in run.step_rows.items():
        row |= {"optimizer": "SGD#0", "lr": 0.1, "grad_norm": factor**step, "loss": factor**step}
    return run


def large_at_first_without_harm() -> Training:
    return thrown_off(loss=2.5)


def never_fell(grown: float = 12.0, loss: float = 1.37) -> Training:
    """Replaced at first, twelve times as large in the end, and the loss is where it was."""
    run = thrown_off(loss=1.4)
    for step, row in run.step_rows.items():
        row.update(loss=1.4 if step % 2 else loss)
        if step > 2:
            run.change(lambda r: r.update(normal(grown)), kind="weight", module="head", step=step)
    return run


def at_the_peak(warm_up: int = 4, falls: float = 0.97, modules: int = 8) -> Training:
    """All matrices replaced once the rate has reached its peak; the loss falls by this factor per step."""
    run = Training(steps=24)
    heads = {r["module"] for r in run.tensors[0] if r["kind"] == "update"}
    for step, row in run.step_rows.items():
        row.update(lr=0.1 * min(1.0, (step + 1) / (warm_up + 1)), loss=1.4 * falls**step)
        for module in sorted(heads)[:modules]:
            moved = 0.8 if step >= warm_up // 2 else 0.001
            run.change(lambda r, m=moved: r.update(normal(m)), kind="update", module=module, step=step)
            if step > warm_up + 3:
                run.change(lambda r: r.update(normal(12.0)), kind="weight", module=module, step=step)
    return run


def raw_targets() -> Training:
    """The weights have to grow, and the loss falls with them."""
    return at_the_peak(falls=0.9)


def two_layers_only() -> Training:
    return at_the_peak(modules=2)


def half_of_it_lost(grown: float = 12.0, waits: int = 12) -> Training:
    """Replaced at first; the loss begins to fall after so many of 24 steps."""
    run = Training(steps=24)
    for step, row in run.step_rows.items():
        row.update(loss=1.4 * 0.93 ** max(0, step - waits))
        run.change(lambda r: r.update(normal(0.8 if r["kind"] == "update" else 1.0)), module="head", step=step)
        if step > 2:
            run.change(lambda r: r.update(normal(0.01)), kind="update", module="head", step=step)
            run.change(lambda r: r.update(normal(grown)), kind="weight", module="head", step=step)
    return run


def a_plateau_of_weights_that_keep_their_size() -> Training:
    """A task that takes half of the run to understand."""
    return half_of_it_lost(grown=1.2)


def a_short_plateau() -> Training:
    return half_of_it_lost(waits=4)


def still_what_it_was() -> Training:
    """A game whose losses stay where they are, and weights that have found their size."""
    return never_fell(grown=1.5)


def learnt_nevertheless() -> Training:
    run = never_fell()
    for step, row in run.step_rows.items():
        row.update(loss=1.4 * 0.9**step)
    return run


def a_bump(until: int = 7, left: float = 0.5) -> Training:
    """The loss triples in the first steps, is below its first value after ``until`` and has this share of it left."""
    run = thrown_off(steps=40)
    for step, row in run.step_rows.items():
        row.update(loss=row["loss"] if step < until else 3.0 * left)
    return run


def a_long_bump_and_learnt() -> Training:
    return a_bump(until=14, left=0.05)


def without_warm_up() -> Training:
    """After the first step the weight is as large as its updates: it is the initial weight that they outweigh."""
    run = thrown_off(first=0.4)
    run.change(lambda r: r.update(normal(0.1)), kind="weight", module="head", step=0)
    return run


def small_at_first(loss: float, first: float = 0.012) -> Training:
    """A small head grows to many times its size at once."""
    run = Training(steps=40)
    for step, row in run.step_rows.items():
        row["loss"] = 0.7 if step == 0 else loss
        size = first if step == 0 else 0.3
        run.change(lambda r, size=size: r.update(normal(size)), kind="weight", module="head", step=step)
        update = 0.3 if step < 3 else 1e-3
        run.change(lambda r, size=update: r.update(normal(size)), kind="update", module="head", step=step)
    return run


def small_and_learnt() -> Training:
    return small_at_first(0.69)


def policy_head() -> Training:
    """A head that is as good as zero, and a loss that is no yardstick."""
    return small_at_first(1.0, first=1e-3)


def small_and_worse() -> Training:
    return small_at_first(1.0)


def from_nothing(first: float = 0.04) -> Training:
    """A head that begins at exactly zero: its size at the second step is that of its first update."""
    run = thrown_off(first=first)
    run.change(lambda r: r.update(normal(0.0)), kind="weight", module="head", step=0)
    return run


def from_zero() -> Training:
    """As good as zero to begin with: any update is many times its size."""
    run = thrown_off(first=0.01)
    for step in range(3):
        run.change(lambda r: r.update(normal(1e-3)), kind="weight", module="head", step=step)
    return run


def decays(weight_decay: float, left: float = 0.01, kind: str = "AdamW") -> Training:
    """Every matrix shrinks to a hundredth of its size, at a learning rate of 1e-3."""
    [optimizer] = FACTS["optimizers"]
    [group] = optimizer["groups"]
    group = {**group, "weight_decay": weight_decay, "decoupled_weight_decay": kind == "AdamW"}
    run = Training(facts={**FACTS, "optimizers": [{**optimizer, "class": kind, "groups": [group]}]})
    for step in run.tensors:
        size = left ** (step / (run.steps - 1))
        run.change(lambda r, size=size: r.update(normal(size)), kind="weight", step=step)
        run.change(lambda r, size=size: r.update(normal(1e-3 * size)), kind="update", step=step)
    return run


def shrinks_by_itself() -> Training:
    """At a decay that takes ten thousand steps."""
    return decays(weight_decay=0.1)


def decay_that_the_gradient_balances() -> Training:
    return decays(weight_decay=20.0, left=0.7)


def l2_under_adam() -> Training:
    """Divided by the gradient's size, it takes no share of the weight away."""
    return decays(weight_decay=20.0, kind="Adam")


def penalised(gradient: float, kind: str = "Adam", left: float = 0.01) -> Training:
    """L2 of 1 under an optimizer that divides by the size of the sum, and gradients of this size times the weight's."""
    run = decays(weight_decay=1.0, left=left, kind=kind)
    for step in run.tensors:
        size = gradient * left ** (step / (run.steps - 1))
        run.change(lambda r, size=size: r.update(normal(size)), kind="weight_grad_step", step=step)
    return run


def a_penalty_that_the_gradient_balances() -> Training:
    return penalised(gradient=0.8)


def a_penalty_of_weights_that_stay() -> Training:
    """Gradients are small at the end of a training, and the weights have found their size."""
    return penalised(gradient=1e-3, left=0.7)


def one_pruned_layer() -> Training:
    """A single matrix goes to zero among others that do not."""
    run = penalised(gradient=1e-3)
    return run.change(lambda r: None if r["module"] == "head" else r.update(normal(1.0)), kind="weight")


def brisk() -> Training:
    return updates(0.1)


def large_at_first() -> Training:
    return updates(1.0, until=6)


def a_bias() -> Training:
    run = updates(1.0)
    return run.change(lambda r: r.update(shape=[4096]), module="head")


def second_optimizer(until: int = 31) -> Training:
    """A head that another optimizer trains at the end of the run; its first updates, up to ``until``, are large."""
    run = Training(steps=36)
    for step, row in run.step_rows.items():
        row["optimizer"] = "AdamW#0" if step < 24 else "SGD#0"
        rows = run.tensors[step]
        run.tensors[step] = [r for r in rows if r["module"] != "head" or step >= 24 or r["kind"] != "update"]
        size = 0.9 if step < until else 0.01
        run.change(lambda r, size=size: r.update(normal(size)), kind="update", module="head", step=step)
    return run


def another_began_worse() -> Training:
    """The first optimizer's steps are large and good; a second one, which follows it, makes the loss rise."""
    run = updates(0.8, until=3, steps=36)
    for step, row in run.step_rows.items():
        row["optimizer"] = "LBFGS#0" if step < 12 else "AdamW#0"
        row["loss"] = 3.0 * 0.9**step if step < 13 else 6.0 * 0.9 ** (step - 12)
    return run


def wanders_from_nothing(update: float = 0.1) -> Training:
    """A policy head of gain 0.01 in a run of twelve steps: it is the sum of a few updates in random directions."""
    run = Training()
    for step in run.tensors:
        size = 0.1 * step**0.5 if step else 1e-3
        run.change(lambda r, size=size: r.update(normal(size)), kind="weight", module="head", step=step)
        run.change(lambda r: r.update(normal(update)), kind="update", module="head", step=step)
    return run


FIRING = {
    "second_optimizer": Sample(lambda: second_optimizer(36), module="head", severity="warning", says=("0.9",)),
    "replaced_from_nothing": Sample(lambda: wanders_from_nothing(0.3), module="head", severity="warning"),
    "thrown_off": Sample(thrown_off, module="head", kind="update", severity="warning",
                         says=("the first 3 steps", "limit 0.5", "more than doubled")),
    "a_long_bump": Sample(lambda: a_bump(until=14), module="head", severity="warning", says=("more than doubled",)),
    "too_far_from_nothing": Sample(lambda: from_nothing(0.4), module="head", severity="warning",
                                   says=("3.2 of a usual initial RMS of 0.12", "limit 0.5", "more than doubled")),
    "diverges": Sample(diverges, module="head", severity="warning",
                       says=("grows 1.5 times per step", "1.2 times the largest stable one, 0.08")),
    "never_fell": Sample(never_fell, module="head", severity="warning",
                         says=("half of the run the loss did not fall", "12 times its initial")),
    "at_the_peak": Sample(at_the_peak, severity="warning", bare=True,
                          says=("steps at the full rate", "In the next 9 steps the loss fell by less than 20 %")),
    "half_of_it_lost": Sample(half_of_it_lost, module="head", severity="warning",
                              says=("half of the run the loss did not fall", "limit 0.5")),
    "without_warm_up": Sample(without_warm_up, module="head", severity="warning", says=("of its initial RMS",)),
    "small_and_worse": Sample(small_and_worse, module="head", severity="warning", says=("the loss did not fall",)),
    "decays": Sample(
        lambda: decays(weight_decay=20.0), kind="weight", severity="warning", bare=True,
        says=("weight decay takes 2 %", "down to 1 %", "0.02 per step", "remember about 50 steps"),
    ),
    "penalised": Sample(
        lambda: penalised(gradient=0.01), kind="weight", severity="warning", bare=True,
        says=("100 times", "down to 1 %"),
    ),
    "penalised_under_rmsprop": Sample(
        lambda: penalised(gradient=0.1, kind="RMSprop"), kind="weight", severity="warning", bare=True,
        says=("10 times", "by about the learning rate, 0.001, per step"),
    ),
    "replaced": Sample(lambda: updates(0.9), module="head", kind="update", severity="warning",
                       says=("limit 0.3", "0.001")),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        brisk,
        shrinks_by_itself,
        decay_that_the_gradient_balances,
        l2_under_adam,
        a_penalty_that_the_gradient_balances,
        a_penalty_of_weights_that_stay,
        one_pruned_layer,
        large_at_first,
        a_bias,
        a_bump,
        a_long_bump_and_learnt,
        large_at_first_without_harm,
        from_zero,
        from_nothing,
        second_optimizer,
        another_began_worse,
        small_and_learnt,
        policy_head,
        wanders_from_nothing,
        still_what_it_was,
        a_plateau_of_weights_that_keep_their_size,
        a_short_plateau,
        learnt_nevertheless,
        raw_targets,
        two_layers_only,
    )
}
