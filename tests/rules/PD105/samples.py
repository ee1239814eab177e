"""Weights that become non-finite while every gradient is finite."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, find, spoil


def optimizer_made_them() -> Training:
    return Training().poison(7, "update", "norm", pos_inf=3)


def rate_is_no_number() -> Training:
    """No microscope: the rate is known from the steps table only."""
    run = Training().poison(7, "update", "norm", nan=3)
    run.step_rows[7] |= {"lr": float("nan"), "lrs": [1e-3, float("nan")]}
    return run


def eps_underflows() -> Training:
    """Adam on FP16 weights: eps 1e-8 is zero there."""
    return Training(dtype="float16", weight_dtype="float16").poison(7, "update", "norm", nan=3)


def no_update_recorded() -> Training:
    """Update rows rotate over the tensors; the step before had a finite weight and gradient."""
    run = Training().poison(8, "weight", "norm", nan=3)
    for rows in run.tensors.values():
        rows.remove(find(rows, "update", "norm"))
    return run


def between_two_steps() -> Training:
    """Someone wrote to the weights: the update of step 7 was finite, the weight of step 8 is not."""
    return Training().poison(8, "weight", "norm", nan=3)


def loaded_bad() -> Training:
    run = Training(steps=4)
    for step in range(4):
        run.poison(step, "weight", "norm", then=False, nan=1)
    return run


def never_initialised() -> Training:
    """After `to_empty`: bits of anything."""
    run = loaded_bad()
    for rows in run.tensors.values():
        row = find(rows, "weight", "norm")
        left = row["numel"] - row["nan"]
        counts = [left // 100] * 100
        counts[0] += left - sum(counts)
        row.update(exp_lo=-60, exp_hist=counts, amax=2.0**39, zero=0)
    return run


def minus_infinity_parameter() -> Training:
    """A mask kept as a (frozen) parameter."""
    return Training().change(lambda r: spoil(r, neg_inf=100), kind="weight", module="norm")


def skipped_steps_keep_weights() -> Training:
    return Training(dtype="float16").scales([1024.0] * 8 + [512.0] * 4).skip(7)


def no_facts() -> Training:
    """The process died before rank.json was written."""
    return Training(facts={})


assert FACTS["optimizers"][0]["groups"][0]["eps"] == 1e-8

FIRING = {
    "optimizer_made_them": Sample(
        optimizer_made_them,
        7,
        "norm",
        "update",
        "optimizer-overflow",
        last_finite=6,
        says=("gradient that the optimizer",),
    ),
    "rate_is_no_number": Sample(
        rate_is_no_number, 7, "norm", "update", "other", says=("the learning rate of parameter group 1 is NaN",)
    ),
    "eps_underflows": Sample(eps_underflows, 7, "norm", "update", "optimizer-division-by-zero", says=("eps 1e-08",)),
    "no_update_recorded": Sample(no_update_recorded, 7, "norm", "weight", last_finite=6),
    "between_two_steps": Sample(between_two_steps, 8, "norm", "weight", "nonfinite-weights", last_finite=6),
    "loaded_bad": Sample(
        loaded_bad, 0, "norm", "weight", "nonfinite-weights", last_finite=None, says=("first recorded",)
    ),
    "never_initialised": Sample(
        never_initialised, 0, "norm", "weight", "nonfinite-weights", says=("spread over 100 binades",)
    ),
}
HEALTHY = {f.__name__: f for f in (minus_infinity_parameter, skipped_steps_keep_weights, no_facts)}
