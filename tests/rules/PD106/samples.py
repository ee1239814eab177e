"""Buffers that do not recover."""

from tests.support.samples import Sample
from tests.support.training import Training, normal, tensor


def buffer(name: str = "running_var", *, bad: range = range(0), steps: int = 12, **counts: int) -> Training:
    """A buffer of the last norm, with these counts of non-finite elements on the ``bad`` steps."""
    run = Training(steps=steps)
    for step, rows in run.tensors.items():
        row = tensor(step, "buffer", "norm", len(rows), name=name, **normal(1.0))
        rows.append(row | (counts if step in bad else {}))
    return run


def recovers() -> Training:
    """It is written anew on every step."""
    return buffer("last_scores", bad=range(5, 8), nan=3)


def from_the_start() -> Training:
    """An observer's minimum before it has seen anything."""
    return buffer("min_val", bad=range(12), pos_inf=1)


def a_mask() -> Training:
    return buffer("mask", bad=range(5, 12), neg_inf=20)


FIRING = {
    "stays": Sample(
        lambda: buffer(bad=range(5, 12), nan=16), 5, "norm", "buffer", last_finite=4,
        says=("although the loss is finite", "on 6 steps", "16 NaN"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (buffer, recovers, from_the_start, a_mask)}
