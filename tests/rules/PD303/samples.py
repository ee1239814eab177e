"""Loss scales that are too low for the gradients, and gradients that are small whatever the scale."""

from tests.support.samples import Sample
from tests.support.training import Training, normal


def gradients(sigma: float, *, dtype: str = "float16", scale: float | None = 4.0) -> Training:
    """Gradients of this size as they lie in memory, the scale included."""
    run = Training(dtype=dtype, scale=scale)
    for step, row in run.step_rows.items():
        row["growth_tracker"] = step
    return run.change(lambda r: r.update(normal(sigma, "float16")), kind="grad_output")


def in_bf16() -> Training:
    return gradients(6e-7, dtype="bfloat16")


def of_order_one() -> Training:
    return gradients(1.0)


def no_scale() -> Training:
    """PD305's business; here with enough bits for information."""
    return gradients(1.2e-5, scale=None)


def no_room_above() -> Training:
    """One gradient reaches 30,000 at the same scale; the others keep seven bits."""
    run = gradients(1.2e-5)
    return run.change(lambda r: r.update(normal(8000.0, "float16")), kind="grad_output", module="head")


def held_down_by_one() -> Training:
    """One gradient reaches 30,000, and the others have too few bits left at the scale it allows."""
    run = gradients(4e-6)
    return run.change(lambda r: r.update(normal(8000.0, "float16")), kind="grad_output", module="head")


def constant() -> Training:
    run = gradients(4e-6)
    for row in run.step_rows.values():
        row["growth_tracker"] = None
    return run


def second_scaler() -> Training:
    """A discriminator on odd steps whose scaler is stuck at 4; the generator's is at 65536, with large gradients."""
    run = gradients(1000.0, scale=65536.0)
    run.facts = {**run.facts, "scalers": [{"growth_interval": 2000}, {"growth_interval": 2000}]}
    for step, rows in run.tensors.items():
        if step % 2:
            run.step_rows[step] |= {"optimizer": "AdamW#1", "loss_scale": 4.0}
            for row in rows:
                row["root"] = "Discriminator#0" if row["kind"] != "loss" else ""
                row.update(normal(4e-6, "float16") if row["kind"] == "grad_output" else {})
        else:
            rows[:] = [r | (normal(8000.0, "float16") if r["kind"] == "grad_output" else {}) for r in rows]
    return run


FIRING = {
    "few_bits": Sample(
        lambda: gradients(8e-7), kind="grad_output", severity="warning", says=("stuck at 4", "limit 25 %", "of 11"),
    ),
    "half_of_the_bits": Sample(lambda: gradients(4e-6), severity="warning", says=("of 11", "limit 8")),
    "enough_bits": Sample(lambda: gradients(1.2e-5), severity="info", says=("doubles every",)),
    "constant": Sample(constant, severity="warning", says=("is a constant",)),
    "held_down_by_one": Sample(held_down_by_one, severity="warning", says=("`head` keeps it so low",)),
    "second_scaler": Sample(
        second_scaler, severity="warning", says=("stuck at 4:", "The loss scale is 4 after 6 steps", "times larger"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (in_bf16, of_order_one, no_scale, no_room_above)}
