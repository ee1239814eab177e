"""States that are written to and stay as they are, and such that move: as scans and as fingerprints show them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import Training, histogram, tensor


def stalled(**changes: Any) -> dict[str, Any]:
    """What an average in BF16 looks like under a decay of 0.999."""
    measured = {"dtype": "bfloat16", "moved": 1000, "stalled": 990, "of": 1000, "tensors": 4, "bits_missing": 2.5}
    where = {"phase": "script", "target": "state", "value": 0.06, "move": 3e-5}
    found = fact("stalled", "lerp_.Scalar", **(told := {**measured, **where, **changes}))
    return {**found, "root": "", "module": "", "data": {**found["data"], "dtype": told["dtype"]}}


def moves_mostly() -> Training:
    return scanned(stalled(stalled=550))


def one_step() -> Training:
    """Before the student has moved, its teacher has nothing to follow."""
    return with_scans(scanned(stalled(), steps=(1,)), 2, 3)


def moves_later() -> Training:
    return with_scans(scanned(stalled(), steps=(1, 2)), 3, 4, 5)


def weights_of_an_optimizer() -> Training:
    return scanned(stalled(target="weight", name="blocks.0.attn.weight"))


def decay(move: float) -> Training:
    """BF16 weights that decoupled weight decay multiplies by slightly less than one, over 64 steps."""
    found = stalled(target="weight", name="blocks.0.attn.weight", value=0.3, move=move, phase="optimizer")
    run = Training(steps=64)
    run.events = scanned({**found, "op": "aten.mul_.Tensor"}).events
    return run


def small_decay() -> Training:
    return decay(3e-7)


def adams_own() -> Training:
    return scanned({**stalled(phase="optimizer"), "code": "optimizer.step()"})


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


def seen_both_ways() -> Training:
    """A scan sees one average, fingerprints another."""
    run = average(changes=False)
    run.events = scanned(stalled()).events
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
    "average": Sample(
        lambda: scanned(stalled()), 0, severity="warning",
        says=("99 % of the elements of a state", "limit 60 %", "2.5 bits", "code between two steps"),
    ),
    "count": Sample(
        lambda: scanned({**stalled(moved=1, stalled=1, of=1, tensors=1, bits_missing=0.0, value=256.0, move=1.0),
                         "op": "aten.add_.Tensor"}),
        0, severity="warning", says=("add changes nothing", "values of 256 by 1"),
    ),
    "decay": Sample(
        lambda: decay(1e-3), 0, severity="warning", says=("mul changes nothing", "weights (`blocks.0.attn.weight`)"),
    ),
    "refilled_masters": Sample(
        lambda: scanned({**stalled(target="weight", name="blocks.0.attn.weight"), "op": "aten.copy_.default"}), 0,
        severity="warning", says=("copy changes nothing", "weights (`blocks.0.attn.weight`)", "on every step"),
    ),
    "teacher_in_a_module": Sample(
        lambda: scanned(stalled(target="average", name="teacher.weight")), 0, severity="warning",
        says=("an average of weights (`teacher.weight`)",),
    ),
    "seen_both_ways": Sample(
        seen_both_ways, 0, severity="warning", bare=True,
        says=("99 % of the elements of a state", "In addition, the average `teacher.attn.proj.weight`"),
    ),
    "teacher_and_batch_norm": Sample(
        both, module="teacher.attn.proj", kind="weight", severity="warning", bare=True,
        says=("the average `teacher.attn.proj.weight`", "In addition, the running statistic `norm.running_var`"),
    ),
    "count_by_fingerprints": Sample(
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
    "teacher_by_fingerprints": Sample(
        lambda: average(changes=False), module="teacher.attn.proj", kind="weight", severity="warning", bare=True,
        says=("`blocks.0.attn.proj.weight`", "limit 6", "11 times"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        *(moves_mostly, one_step, moves_later, weights_of_an_optimizer, small_decay, adams_own),
        *(moves, momentum_of_zero, in_fp32, nothing_to_follow, copied_now_and_then),
        *(ramp_that_ends, held_elsewhere, counts_in_fp32, still_counting),
    )
}
