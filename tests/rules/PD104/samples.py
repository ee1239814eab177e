"""Bad data, and data that is only unusual."""

from tests.support.samples import Sample
from tests.support.training import Training, find, spoil, tensor


def with_batches(steps: int = 16, amax: float = 3.0, **columns: object) -> Training:
    """A model that is given floating-point images."""
    run = Training(steps=steps)
    for step, rows in run.tensors.items():
        for row in rows:
            row["order"] += 1
        rows.insert(0, tensor(step, "batch", "", 0, module_class="GPT", name="0", amax=amax, **columns))
    return run


def nan_in_batch() -> Training:
    return with_batches().poison(9, "batch", "", nan=4)


def never_stepped_again() -> Training:
    """The script leaves the step out, and zero_grad with it."""
    run = with_batches(steps=10).poison(9, "batch", "", nan=4)
    run.step_rows[9] |= {"complete": False, "micro_steps": 40}
    for step in range(9):
        run.step_rows[step]["micro_steps"] = 1
    return run


def infinite_batch_skipped_by_scaler() -> Training:
    run = with_batches().scales([1024.0] * 16).poison(9, "batch", "", then=False, pos_inf=4).skip(9)
    run.step_rows[9]["loss"] = float("nan")
    return run


def extreme_then_overflow() -> Training:
    """One sample throws the weights; the step after it overflows."""
    run = with_batches()
    find(run.tensors[12], "batch").update(amax=1e6)
    return run.poison(13, "output", "blocks.0.mlp.up", pos_inf=5)


def extreme_alone() -> Training:
    run = with_batches()
    find(run.tensors[12], "batch").update(amax=1e6)
    return run


def harmless_nan_once() -> Training:
    run = with_batches()
    spoil(find(run.tensors[12], "batch"), nan=3)
    return run


def nan_that_poisons_a_buffer() -> Training:
    """The script leaves such a step out; the running statistics have read the batch by then."""
    run = with_batches(steps=24)
    for step in (9, 12):
        spoil(find(run.tensors[step], "batch"), nan=3)
    for step, rows in run.tensors.items():
        rows.append(tensor(step, "buffer", "norm", len(rows), name="running_var") | ({"nan": 16} if step >= 12 else {}))
    return run


def mask_as_argument() -> Training:
    """An additive mask is handed to the model."""
    return with_batches(amax=0.0).change(lambda r: spoil(r, neg_inf=500), kind="batch")


def missing_values_everywhere() -> Training:
    """NaN stands for "missing", and the model knows."""
    return with_batches().change(lambda r: spoil(r, nan=7), kind="batch")


def noise_levels() -> Training:
    """Diffusion: one number per sample, anywhere between 1e-3 and 80."""
    run = with_batches(numel=4)
    for step in run.tensors:
        find(run.tensors[step], "batch").update(amax=80.0 if step == 12 else 2e-3)
    return run


def heavy_tails() -> Training:
    run = with_batches()
    for step in run.tensors:
        find(run.tensors[step], "batch").update(amax=3.0 * 2.0 ** ((step * 7) % 8))
    return run


def starts_with_zeros() -> Training:
    """Nothing but zeros at first is no range to compare with."""
    run = with_batches()
    for step in range(10):
        find(run.tensors[step], "batch").update(amax=0.0)
    return run


FIRING = {
    "never_stepped_again": Sample(never_stepped_again, 9, "", "batch", says=("went on with 39 backward passes",)),
    "nan_in_batch": Sample(nan_in_batch, 9, "", "batch", "nonfinite-input-batch", last_finite=8, says=("4 NaN",)),
    "infinite_batch_skipped_by_scaler": Sample(
        infinite_batch_skipped_by_scaler, 9, "", "batch", "nonfinite-input-batch", "warning"
    ),
    "extreme_then_overflow": Sample(
        extreme_then_overflow, 12, "", "batch", "extreme-input-batch", last_finite=11, says=("18.3 binades", "limit 10")
    ),
    "extreme_alone": Sample(extreme_alone, 12, "", "batch", "extreme-input-batch", "warning", says=("limit 10",)),
    "harmless_nan_once": Sample(harmless_nan_once, 12, "", "batch", "nonfinite-input-batch", "info"),
    "nan_that_poisons_a_buffer": Sample(
        nan_that_poisons_a_buffer,
        12,
        "",
        "batch",
        "nonfinite-input-batch",
        last_finite=11,
        says=("buffer `norm.running_var` is non-finite since",),
    ),
}
HEALTHY = {
    f.__name__: f
    for f in (with_batches, mask_as_argument, missing_values_everywhere, noise_levels, heavy_tails, starts_with_zeros)
}
