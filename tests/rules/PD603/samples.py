"""Gradient norms that explode, and norms that are merely large."""

import json
from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, find, normal


def run(norm: Callable[[int], float], loss: Callable[[int], float], steps: int = 30) -> Training:
    training = Training(steps=steps)
    for step, row in training.step_rows.items():
        row.update(grad_norm=norm(step), loss=loss(step))
    return training


def explodes() -> Training:
    """From step 20 on, and one layer most of all."""
    training = run(lambda s: 0.5 if s < 20 else 80.0, lambda s: 3.0 - 0.1 * s if s < 21 else 6.0)
    for step in range(20, 30):
        find(training.tensors[step], "weight_grad", "blocks.0.attn.qkv").update(normal(300.0))
    return training


def one_fatal_step(after: float = 0.0, blow: float = 1e6) -> Training:
    """Thrown to where everything is flat; the loss looks no worse for it."""
    training = run(lambda s: 0.5 if s < 20 else blow if s == 20 else after, lambda s: 0.02 + 0.001 * (s % 3))
    find(training.tensors[20], "weight_grad", "head").update(normal(blow))
    return training


def recovers() -> Training:
    """A batch that clipping or luck was kind to."""
    return one_fatal_step(after=0.4)


def got_over_it() -> Training:
    """Episodes grow long at once; ten steps later the agent has caught up, and losses of either sign go on."""
    return run(
        lambda s: 0.5 if s < 20 else 80.0 if s < 30 else 6.0,
        lambda s: 1.0 + 0.1 * (s % 3) if s < 21 else 90.0 if s < 30 else 8.0 * (-1) ** s + 5.0,
        steps=60,
    )


def down_to_what_was_ruined() -> Training:
    """An explosion out of a run that had gone wrong before: to be back there is not to have got over it."""
    return run(
        lambda s: 0.5 if s < 20 else 80.0 if s < 30 else 6.0,
        lambda s: 1.0 if s == 0 else 40.0 if s < 21 else 9000.0 if s < 30 else 45.0,
        steps=60,
    )


def all_learnt() -> Training:
    return one_fatal_step(blow=0.6)


def term_switched_on() -> Training:
    """Norm and loss jump in one step, behind an ordinary update."""
    return run(lambda s: 0.5 if s < 20 else 80.0, lambda s: 3.0 - 0.1 * s if s < 20 else 15.0 - 0.1 * s)


def one_large_batch() -> Training:
    return run(lambda s: 90.0 if s == 20 else 0.5, lambda s: 3.0 - 0.05 * s)


def large_at_the_start() -> Training:
    return run(lambda s: 90.0 if s < 6 else 0.5, lambda s: 3.0 - 0.05 * s)


def loss_takes_no_harm() -> Training:
    return run(lambda s: 0.5 if s < 20 else 80.0, lambda s: 3.0 - 0.05 * s)


def wobble_near_zero() -> Training:
    return run(lambda s: 1e-4 if s < 20 else 1e-2, lambda s: 3.0 * 0.5**s if s < 20 else 1e-3)


def diverges() -> Training:
    """Bit by bit: no step stands out against the ones before it."""
    training = run(lambda s: 0.5 * 1.2**s, lambda s: 2.0 * 1.2**s, steps=60)
    for step in range(1, 60):
        find(training.tensors[step], "weight_grad", "blocks.0.attn.qkv").update(normal(1.2**step))
    return training


def thrown_off_at_once() -> Training:
    """In the first step behind the initial one; there is no level to jump from."""
    return run(lambda s: 0.5 if s == 0 else 1e6, lambda s: 3.0 if s == 0 else 1e9)


def thrown_off_for_good(end: float = 20.0) -> Training:
    """The first update throws a log-likelihood off; the run comes down again, but never to where it began."""
    return run(lambda s: 0.5 if s == 0 else 1e4 / s, lambda s: -1.4 if s == 0 else end + 1e4 * 0.7**s, steps=60)


def thrown_off_and_back() -> Training:
    return thrown_off_for_good(-3.0)


def sparse_reward() -> Training:
    """A loss that begins near zero, for there is nothing to be wrong about yet."""
    return run(lambda s: 1e-4 * (1 + s) ** 2, lambda s: 1e-5 * (1 + s) ** 2, steps=60)


def adversary() -> Training:
    """Losses of either sign say nothing by their ratio."""
    return run(lambda s: 1e-2 * (1 + s) ** 2, lambda s: -0.1 if s == 0 else (1.0 + s) ** 2, steps=60)


def nothing_holds_the_critic() -> Training:
    """Scores that are larger for the one kind of input than for the other, without end."""
    training = run(lambda s: 0.5 * 1.1**s, lambda s: -0.5 * 1.15**s, steps=80)
    for step in range(1, 80):
        find(training.tensors[step], "weight_grad", "head").update(normal(1.1**step))
    return training


def likelihood() -> Training:
    """A density of many dimensions gets narrow: its log grows, and so do its gradients."""
    return run(lambda s: 10.0 * 1.05**s, lambda s: 800.0 - 45.0 * s, steps=80)


def returns_grow() -> Training:
    """An agent's losses have either sign, and grow with what it earns."""
    return run(lambda s: 0.5 * 1.06**s, lambda s: (-1) ** s * 0.5 * 1.06**s, steps=80)


def kept(steps: int, *, until: int = 29, what: str = "kept-gradients") -> Training:
    """The recorder has seen gradients that were not zeroed."""
    training = run(lambda s: 0.5 + 0.5 * s, lambda s: 3.0 - 0.05 * s)
    data = {"what": what, "optimizer": "AdamW#0", "since": until - steps, "steps": steps, "summed": steps + 1}
    said = json.dumps(data | {"kept": 8, "of": 8})
    training.events.append({"event": "warning", "id": "0-w0", "step": until, "root": "GPT#0", "data": said})
    return training


def never_zeroed() -> Training:
    return kept(29)


def one_of_two_is_never_zeroed() -> Training:
    """Two optimizers hold a part of the model each, and one of them has no ``zero_grad()``."""
    training = never_zeroed()
    (root,), (first,) = FACTS["roots"], FACTS["optimizers"]
    parameters = [{**p, "group": [int(not p["module"].startswith("blocks.0.mlp")), 0]} for p in root["parameters"]]
    optimizers = [first, {**first, "name": "AdamW#1"}]
    training.facts = {**FACTS, "roots": [{**root, "parameters": parameters}], "optimizers": optimizers}
    return training


def zeroed_once_an_epoch() -> Training:
    return kept(9, until=19)


def kept_for_a_moment() -> Training:
    return kept(7)


def another_warning() -> Training:
    return kept(29, what="something else")


FIRING = {
    "never_zeroed": Sample(
        never_zeroed, 0, module="", cause="gradients-not-zeroed", severity="warning", bare=True,
        says=("is never called", "the sum of 30 backward passes", "0.5 at the first one and 15 at the last"),
        evidence={"summed_passes": 30, "kept_steps": 29},
    ),
    "one_of_two_is_never_zeroed": Sample(
        one_of_two_is_never_zeroed, 0, module="blocks.0.mlp.up", cause="gradients-not-zeroed", severity="warning",
        bare=True, says=("never called for the weights of `AdamW#0`", "holds `blocks.0.mlp.up.weight`"),
    ),
    "zeroed_once_an_epoch": Sample(
        zeroed_once_an_epoch, 10, severity="warning", bare=True, says=("no `zero_grad()` for 9 steps",)
    ),
    "nothing_holds_the_critic": Sample(
        nothing_holds_the_critic, module="head", severity="warning", says=("falls without end", "limit 300")
    ),
    "diverges": Sample(diverges, module="blocks.0.attn.qkv", says=("diverges", "limit 1000")),
    "thrown_off_at_once": Sample(thrown_off_at_once, 1, says=("diverges from step 1",)),
    "thrown_off_for_good": Sample(thrown_off_for_good, 1, says=("diverges from step 1", "limit 1000")),
    "one_fatal_step": Sample(one_fatal_step, 20, module="head", says=("ends the training", "limit 1000", "9 steps")),
    "explodes": Sample(
        explodes, 20, module="blocks.0.attn.qkv", kind="weight_grad", last_finite=19,
        says=("limit 30", "Gradients are not clipped", "a factor of 300"),
    ),
    "got_over_it": Sample(got_over_it, 20, severity="warning", says=("the run got over it",)),
    "down_to_what_was_ruined": Sample(down_to_what_was_ruined, 20, severity="error", says=("are not clipped",)),
    "term_switched_on": Sample(term_switched_on, 20, severity="info", says=("was the loss changed",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        thrown_off_and_back,
        one_large_batch,
        large_at_the_start,
        loss_takes_no_harm,
        wobble_near_zero,
        sparse_reward,
        adversary,
        likelihood,
        returns_grow,
        recovers,
        all_learnt,
        kept_for_a_moment,
        another_warning,
    )
}
