"""Logits that grow until their softmax is one-hot, and logits that may be as large or as sharp as they are."""

from collections.abc import Callable, Sequence

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Training, histogram, tensor

ATTENTION = "blocks.0.attn"


def softmax(
    of_step: Callable[[int], float],
    *,
    role: str | None = "attention",
    entropy: Callable[[int], Sequence[float]] = lambda _: (0.6,) * 4,
    steps: int = 32,
    losses: Callable[[int], float] | None = None,
) -> Training:
    """A softmax whose largest logit is ``of_step(step)``, its heads as sharp as ``entropy(step)`` says."""
    run = Training(steps=steps, dtype="bfloat16")
    own = {"attention": (ATTENTION, "sdpa"), "router": ("blocks.0.moe", "softmax")}.get(
        role or "", ("", "cross_entropy")
    )
    for step, rows in run.tensors.items():
        largest, heads = of_step(step), list(entropy(step))
        columns = {
            "name": own[1],
            "role": role,
            "entropy": 1.0,
            "head_entropy": heads,
            "head_max": [largest] * len(heads),
        }
        row = tensor(step, "logits", own[0], len(rows), dtype="bfloat16", **columns)
        rows.append(row | histogram_of(largest))
    if losses is not None:
        for step, row in run.step_rows.items():
            row["loss"] = losses(step)
    return run


def histogram_of(largest: float) -> dict[str, object]:
    return histogram(np.linspace(-largest, largest, 64, dtype=np.float32))


def third_per_step(step: int) -> float:
    return 1.3**step


def towards_its_limit(step: int) -> float:
    """Doubles every eight steps, and has come to 58."""
    return 4.0 * 2.0 ** (step / 8)


def collapsing(step: int) -> Sequence[float]:
    return (max(0.001, 0.9 - step / 16),) * 4


def sharpens(step: int) -> float:
    return min(60.0, 4.0 + 4.0 * step)


def levels_off() -> Training:
    """Early growth, as any training has it."""
    return softmax(lambda s: 30.0 * (1.0 - 0.8**s) + 2.0)


def some_heads_copy() -> Training:
    """Two of four heads attend to one position, with logits of 60."""
    return softmax(sharpens, entropy=lambda s: (*collapsing(s)[:2], 0.7, 0.6))


def a_copying_layer_that_has_learnt() -> Training:
    """All heads are one-hot, and the loss is next to nothing."""
    return softmax(sharpens, entropy=collapsing, losses=lambda s: 4.0 * 0.8**s)


def a_retrieval_that_is_learning() -> Training:
    """All heads are one-hot, and the loss has come to a third: it falls because of them."""
    return softmax(sharpens, entropy=collapsing, losses=lambda s: max(0.7, 2.1 - 0.05 * s))


def a_pointer_that_grows_with_adam() -> Training:
    """Linear growth past the limit, ever slower beside its size, while the loss falls."""
    return softmax(lambda s: 6.0 + 4.0 * s, entropy=collapsing, losses=lambda s: 2.0 * 0.96**s)


def closes(largest: float) -> Training:
    """Heads become one-hot; the loss has come down and stays."""
    logits = lambda s: min(8.0 + 20.0 * s, largest)  # noqa: E731
    return softmax(logits, entropy=collapsing, losses=lambda s: max(1.2, 2 - 0.1 * s))


def closed_below_twice_its_limit() -> Training:
    return closes(150.0)


def a_copy_that_sets_in_late() -> Training:
    """Logits double in the newer half, and so the loss falls."""
    return softmax(towards_its_limit, losses=lambda s: 2.0 - 0.04 * max(0, s - 12))


def hard_attention_by_choice() -> Training:
    """One-hot from the start, at a temperature of 0.01."""
    return softmax(lambda s: 120.0 + s, entropy=lambda _: (0.01,) * 4, losses=lambda s: 2.0 * 0.98**s)


def experts_that_specialise() -> Training:
    return softmax(lambda s: 2.0 + 1.8 * s, role="router", losses=lambda s: 3.0 * 0.97**s)


def rewards_as_a_loss() -> Training:
    """A loss below zero tells nothing of learning."""
    return softmax(sharpens, entropy=collapsing, losses=lambda s: -0.1 * (-1) ** s)


def collapse_and_setback(step: int) -> float:
    """The loss has lost half of what it had gained."""
    return 4.0 - 0.1 * step if step < 16 else 3.2


def clamped_temperature() -> Training:
    return softmax(lambda s: min(100.0, 14.0 * 1.1**s), role="output")


def separable_classes() -> Training:
    """A classifier that separates its data, ever more surely."""
    return softmax(lambda s: 10.0 * 1.15**s, role="output", losses=lambda s: 2.0 * 0.85**s)


def large_from_the_start() -> Training:
    """A temperature somebody chose."""
    return softmax(lambda s: 300.0 + s, role="output")


def nobody_knows_what_for() -> Training:
    """Posteriors of a hidden Markov model, and Gumbel noise over a small temperature."""
    return softmax(third_per_step, role=None)


def balanced_router() -> Training:
    return softmax(lambda s: 2.0 + s / 4, role="router")


def wobbles() -> Training:
    return softmax(lambda s: 60.0 + 25.0 * ((s * 7) % 5 - 2) / 2)


def learned_scale(
    of_step: Callable[[int], float], cosine: float = 0.6, parameter: Callable[[float], float] = np.log
) -> Training:
    """Cosines times a scale of ``of_step(step)``, of which ``parameter`` is learned: by default its logarithm."""
    run = softmax(lambda s: cosine * of_step(s), role="output", losses=lambda s: 2.0 / (1 + s))
    for step, rows in run.tensors.items():
        more = histogram(np.full(1, parameter(of_step(step)), np.float32)) | {"shape": [], "dtype": "float32"}
        rows.append(tensor(step, "weight", "", len(rows), name="logit_scale", **more))
    return run


def clamped_scale() -> Training:
    return learned_scale(lambda s: min(100.0, 20.0 + 5 * s))


def scale_that_came_down() -> Training:
    return learned_scale(lambda s: 150.0 - s)


def scale_of_something_else() -> Training:
    """A parameter beyond the bound, and logits that are far below it."""
    return learned_scale(lambda s: 80.0 + 2 * s, cosine=0.05)


def few_steps() -> Training:
    return softmax(lambda s: 4.0**s, steps=6)


def too_cold(first: float, last: float) -> Training:
    """Logits of 1,000 from the start, over 64 classes: equal probabilities would give a loss of 4.2."""
    return softmax(lambda _: 1000.0, role="output", losses=lambda s: first * (last / first) ** (s / 31))


FIRING = {
    "a temperature that is too low": Sample(
        lambda: too_cold(400.0, 12.0), 0, "", "logits", severity="warning",
        says=("are 1e+03 from the start", "The loss began at"),
    ),
    "one that is learnt away, down to a quarter of equal probabilities": Sample(
        lambda: too_cold(400.0, 1.0), 0, "", "logits", severity="warning", evidence={"loss_fell_to_a_tenth": True},
    ),
    "closed on the way to three times its limit": Sample(
        lambda: closes(300.0), 5, ATTENTION, "logits", severity="warning",
        evidence={"state": "large", "loss_stalls": False},
    ),
    "a third per step": Sample(
        lambda: softmax(third_per_step), 18, ATTENTION, "logits", severity="warning",
        says=("have grown from", "factor of 1.3 per step", "limit 100"), evidence={"state": "large"},
    ),
    "forecast": Sample(
        lambda: softmax(towards_its_limit), 31, ATTENTION, "logits", severity="warning",
        says=("it passes 100 in 6 steps",), evidence={"state": "growing"},
    ),
    "collapse": Sample(
        lambda: softmax(sharpens, entropy=collapsing), ..., ATTENTION, "logits", severity="warning",
        says=("has collapsed: 100 % of its heads are one-hot",), evidence={"state": "collapsed"},
    ),
    "collapse after which the loss rises": Sample(
        lambda: softmax(sharpens, entropy=collapsing, losses=collapse_and_setback), ..., ATTENTION, "logits",
        severity="warning", evidence={"state": "collapsed", "loss_stalls": True},
    ),
    "thousands, though the loss falls": Sample(
        lambda: softmax(lambda s: 500.0 + 200.0 * s, losses=lambda s: 2.0 * 0.97**s), 0, ATTENTION, "logits",
        severity="warning", evidence={"state": "large", "loss_stalls": False},
    ),
    "doubles past its limit, though the loss falls": Sample(
        lambda: softmax(lambda s: 16.0 * 2.0 ** (s / 8), losses=lambda s: 2.0 * 0.97**s), 22, ATTENTION, "logits",
        severity="warning", evidence={"state": "large", "loss_stalls": False},
    ),
    "one-hot from the start": Sample(
        lambda: softmax(lambda s: 150.0 + s, entropy=lambda _: (0.01,) * 4), 0, ATTENTION, "logits",
        severity="warning", says=("100 % of its 4 heads",), evidence={"state": "large"},
    ),
    "a learned scale that passes 100": Sample(
        lambda: learned_scale(lambda s: 91.0 + 2.0 * s), 6, "", "weight", severity="warning", bare=True,
        says=("exp(logit_scale)", "has passed 100", "153 at step 31"), evidence={"state": "scale"},
    ),
    "a learned temperature that falls below a hundredth": Sample(
        lambda: learned_scale(lambda s: 91.0 + 2.0 * s, parameter=lambda scale: 1.0 / scale), 6, "", "weight",
        severity="warning", bare=True, says=("1 / logit_scale", "has passed 100"), evidence={"state": "scale"},
    ),
    "output": Sample(
        lambda: softmax(third_per_step, role="output"), 18, "", "logits", severity="warning", says=("output logits",),
    ),
    "router": Sample(
        lambda: softmax(third_per_step, role="router"), 15, "blocks.0.moe", "logits", severity="warning",
        says=("router logits", "limit 50"),
    ),
}  # fmt: skip
HEALTHY = {
    "confident and soon right": lambda: too_cold(60.0, 0.2),
    "confident from its pretraining on": lambda: too_cold(2.0, 1.5),
} | {
    f.__name__: f
    for f in (
        levels_off,
        some_heads_copy,
        closed_below_twice_its_limit,
        a_copying_layer_that_has_learnt,
        a_retrieval_that_is_learning,
        a_pointer_that_grows_with_adam,
        a_copy_that_sets_in_late,
        hard_attention_by_choice,
        experts_that_specialise,
        rewards_as_a_loss,
        clamped_temperature,
        clamped_scale,
        scale_that_came_down,
        scale_of_something_else,
        separable_classes,
        large_from_the_start,
        nobody_knows_what_for,
        balanced_router,
        wobbles,
        few_steps,
    )
}
