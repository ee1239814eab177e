"""Averages of weights that move, and one that does not."""

from tests.support.samples import Sample
from tests.support.training import Training, tensor


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


FIRING = {
    "teacher": Sample(
        lambda: average(changes=False), module="teacher.attn.proj", kind="weight", severity="warning", bare=True,
        says=("`blocks.0.attn.proj.weight`", "limit 6", "11 times"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (moves, in_fp32, nothing_to_follow, copied_now_and_then)}
