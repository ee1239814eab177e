"""Losses that jump."""

from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.training import Training, find, normal


def losses(of_step: Callable[[int], float], steps: int = 36) -> Training:
    run = Training(steps=steps)
    for step, row in run.step_rows.items():
        row["loss"] = of_step(step)
    return run


def noise(step: int) -> float:
    return 0.02 * ((step * 7) % 5 - 2)


def jumps() -> Training:
    """At step 24; the attention's input projection has left its range two steps before."""
    run = losses(lambda s: 2.0 + noise(s) if s < 24 else 6.0)
    for step in range(22, 36):
        find(run.tensors[step], "output", "blocks.0.attn.qkv").update(normal(32.0))
    return run


def nothing_moved() -> Training:
    """As when a term of the loss is switched on."""
    return losses(lambda s: 2.0 + noise(s) if s < 24 else 6.0)


def norm_moved() -> Training:
    """Only the gradient norm, which is known on every step."""
    run = nothing_moved()
    for step in range(23, 36):
        run.step_rows[step]["grad_norm"] = 9.0
    return run


def one_bad_batch() -> Training:
    return losses(lambda s: 2.0 + noise(s) if s != 24 else 6.0)


def rate_spike(factor: float = 30.0) -> Training:
    """The schedule was lost on resuming: the rate before the jump is thirty times what it was."""
    run = nothing_moved()
    for step in range(22, 36):
        run.step_rows[step]["lr"] = factor * 1e-3
    return run


def rate_rises_and_nothing_happens() -> Training:
    """Warm restarts."""
    run = losses(lambda s: 2.0 + noise(s))
    for step in range(22, 36):
        run.step_rows[step]["lr"] = 0.1
    return run


def term_switched_on() -> Training:
    """A loss with weight zero until step 24."""
    run = losses(lambda s: 0.0 if s < 24 else 2.0 + noise(s))
    for step, row in run.step_rows.items():
        row["grad_norm"] = 0.0 if step < 24 else 3.0
    return run


def heavy_noise() -> Training:
    return losses(lambda s: 2.0 + 30 * noise(s))


def alternating() -> Training:
    """Two tasks that take turns."""
    return losses(lambda s: 1e6 if s % 2 else 4.0)


def rises_slowly() -> Training:
    """A generator losing against its critic."""
    return losses(lambda s: 0.7 + 0.05 * s + noise(s))


def rare_rewards() -> Training:
    """Errors of thousandths, and of tenths when a batch holds a rare reward; such batches come in clusters."""
    high = {3: 0.19, 5: 0.095, 10: 0.094, 13: 0.19, 17: 0.1, 24: 0.28, 25: 0.37, 26: 0.096, 27: 0.19, 28: 0.28}
    run = losses(lambda s: high.get(s, 0.0015 + 0.01 * noise(s)))
    for step in range(22, 36):
        find(run.tensors[step], "output", "blocks.0.attn.qkv").update(normal(32.0))
    return run


def rare_rewards_and_divergence() -> Training:
    """The same, until the values run away."""
    run = rare_rewards()
    for step in range(24, 36):
        run.step_rows[step]["loss"] = 20.0
    return run


FIRING = {
    "rare_rewards_and_divergence": Sample(
        rare_rewards_and_divergence, 22, module="blocks.0.attn.qkv", kind="output", severity="warning"
    ),
    "moved_first": Sample(
        jumps, 22, module="blocks.0.attn.qkv", kind="output", severity="warning", says=("at step 22", "limit 10"),
    ),
    "rate_spike": Sample(
        rate_spike, 24, kind="loss", module=None, severity="warning", bare=True,
        says=("a learning rate 30 times any before", "At step 22 the learning rate rose to 0.03"),
    ),
    "norm_moved": Sample(norm_moved, 24, kind="loss", module=None, severity="warning", bare=True),
    "nothing_moved": Sample(nothing_moved, 24, kind="loss", module=None, severity="info", bare=True),
    "one_bad_batch": Sample(one_bad_batch, 24, severity="info", bare=True, says=("came down again",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        term_switched_on,
        heavy_noise,
        alternating,
        rises_slowly,
        rate_rises_and_nothing_happens,
        rare_rewards,
    )
}
