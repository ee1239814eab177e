"""Averages of weights that move, and one that does not; counts that go on, and such that stop."""

from collections.abc import Callable

import numpy as np

from tests.support.samples import Sample
from tests.support.training import Training, histogram, tensor


def average(
    changes: bool, dtype: str = "bfloat16", *, weight_changes: bool = True, every: int = 1, numel: int = 4096
) -> Training:
    """A second copy of the attention's projection, written to on every ``every``-th step."""
    run = Training()
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == "weight":
                row["fingerprint"] = step if weight_changes else 1
        if step % every == 0:
            more = {"name": "weight", "dtype": dtype, "fingerprint": step if changes else 7, "numel": numel}
            rows.append(tensor(step, "weight", "teacher.attn.proj", len(rows), **more))
    return run


def moves() -> Training:
    return average(changes=True)


def in_fp32() -> Training:
    """An FP32 average of weights that have converged."""
    return average(changes=False, dtype="float32")


def nothing_to_follow() -> Training:
    """The learning rate is zero."""
    return average(changes=False, weight_changes=False)


def copied_now_and_then() -> Training:
    return average(changes=False, every=4)


def count(of_step: Callable[[int], float], dtype: str = "float16", steps: int = 24) -> Training:
    """What a running norm counts its samples in."""
    run = Training(steps=steps)
    for step, rows in run.tensors.items():
        value = of_step(step)
        more = histogram(np.array([value])) | {"shape": [], "dtype": dtype, "fingerprint": int(8 * value)}
        rows.append(tensor(step, "buffer", "norm", len(rows), name="count", **more))
    return run


def batch_norm(mean_changes: bool) -> Training:
    """A BF16 variance that is one for ever, and a mean that follows the data or does not."""
    run = Training()
    for step, rows in run.tensors.items():
        for name, print_, value in (("running_mean", step if mean_changes else 3, 0.1), ("running_var", 7, 1.0)):
            more = histogram(np.full(16, value)) | {"shape": [16], "dtype": "bfloat16", "fingerprint": print_}
            rows.append(tensor(step, "buffer", "norm", len(rows), name=name, **more))
    return run


def both() -> Training:
    """A teacher that stands still, and a batch norm's variance as well."""
    run = average(changes=False)
    for step, rows in batch_norm(mean_changes=True).tensors.items():
        run.tensors[step] += [r for r in rows if r["kind"] == "buffer"]
    return run


def momentum_of_zero() -> Training:
    return batch_norm(mean_changes=False)


def ramp_that_ends() -> Training:
    """A weight of a loss term, warmed up and then held."""
    return count(lambda s: min(1.0, (1 + s) / 8))


def held_elsewhere() -> Training:
    """Told to stop at a number at which one more would still count."""
    return count(lambda s: min(1000.0, 200.0 * (1 + s)))


def counts_in_fp32() -> Training:
    return count(lambda s: min(2048.0, 256.0 * (1 + s)), dtype="float32")


def still_counting() -> Training:
    return count(lambda s: 64.0 * (1 + s))


FIRING = {
    "both": Sample(
        both, module="teacher.attn.proj", kind="weight", severity="warning", bare=True,
        says=("the average `teacher.attn.proj.weight`", "In addition, the running statistic `norm.running_var`"),
    ),
    "count": Sample(
        lambda: count(lambda s: min(2048.0, 320.0 * (1 + s))), 6, module="norm", kind="buffer", severity="warning",
        bare=True, says=("`norm.count`", "2,048", "17 recorded steps", "limit 6"),
    ),
    "count_of_batches": Sample(
        lambda: count(lambda s: min(1024.0, 4.0 * (1 + s)), dtype="bfloat16", steps=280),
        *(255, "norm", "buffer"), severity="warning", bare=True,
    ),
    "running_variance": Sample(
        lambda: batch_norm(mean_changes=True), 11, module="norm", kind="buffer", severity="warning", bare=True,
        says=("`norm.running_var`", "11 recorded steps", "limit 6"),
    ),
    "teacher": Sample(
        lambda: average(changes=False), module="teacher.attn.proj", kind="weight", severity="warning", bare=True,
        says=("`blocks.0.attn.proj.weight`", "limit 6", "11 times"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        moves,
        momentum_of_zero,
        in_fp32,
        nothing_to_follow,
        copied_now_and_then,
        ramp_that_ends,
        held_elsewhere,
        counts_in_fp32,
        still_counting,
    )
}
