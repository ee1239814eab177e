"""Schedules that end too early, and schedules that touch zero."""

import math

from tests.support.samples import Sample
from tests.support.training import FACTS, Training


def rates(*values: float, steps: int = 40) -> Training:
    """Steps at these learning rates; the last one holds to the end."""
    run = Training(steps=steps)
    for step, row in run.step_rows.items():
        row["lr"] = values[min(step, len(values) - 1)]
    return run


def per_micro_batch(micro_batches: int = 8, steps: int = 80) -> Training:
    """A schedule of ``steps`` steps that is advanced on each micro-batch."""
    run = rates(*[max(0.0, 1.0 - micro_batches * n / steps) for n in range(steps)], steps=steps)
    for row in run.step_rows.values():
        row["micro_steps"] = micro_batches
    return run


def group(*values: float) -> Training:
    """Steps at 1e-3, but for the second parameter group, which has these rates; the last one holds to the end."""
    run = rates(1e-3)
    for step, row in run.step_rows.items():
        row["lrs"] = [1e-3, values[min(step, len(values) - 1)]]
    return run


def frozen_group() -> Training:
    return group(*[1e-3] * 4, 0.0)


def slower_group() -> Training:
    return group(1e-6)


def made_with(base: float, *values: float, before: int | None = None) -> Training:
    """An optimizer that is made with the rate ``base`` and steps at others."""
    run = rates(*values)
    own = {**FACTS["optimizers"][0], "groups": [{"initial_lr": base, "parameters": 8}], "steps_before": before}
    run.facts = {**FACTS, "optimizers": [own]}
    return run


def noam() -> Training:
    return made_with(1.0, 1e-4, 1e-3, 5e-4)


def a_warm_up_longer_than_the_run() -> Training:
    return made_with(1e-3, *[1e-8 * n for n in range(40)])


def the_end_of_a_schedule() -> Training:
    return made_with(1e-3, *[1e-8 * (80 - n) for n in range(40)], before=1000)


def warm_up_from_zero() -> Training:
    return rates(0.0, 1e-4, 1e-3)


def zero_from_the_beginning() -> Training:
    return rates(0.0)


def small_to_the_end() -> Training:
    """Two phases: a fine-tuning at a hundredth of the rate."""
    return rates(*[1e-3] * 4, 1e-5)


def exponential_to_a_millionth() -> Training:
    return rates(*[10 ** (-6 * n / 80) for n in range(80)], steps=80)


def cosine() -> Training:
    return rates(*[1.0 + math.cos(math.pi * n / 80) for n in range(81)], steps=80)


def a_long_tail() -> Training:
    return rates(*[1e-3] * 60, 0.0, steps=100)


def too_few_steps() -> Training:
    return rates(1e-3, 0.0, steps=16)


FIRING = {
    "schedule_ran_out": Sample(
        lambda: rates(1e-3, 1e-4, 0.0), 2, module=None, kind=None, severity="warning", bare=True,
        says=("the last 38 of 40 steps", "limit 50 %"), evidence={"idle_steps": 38},
    ),
    "per_micro_batch": Sample(
        per_micro_batch, 10, module=None, kind=None, severity="warning", bare=True, says=("the last 70 of 80 steps",)
    ),
    "decays_on_every_step": Sample(
        lambda: rates(*[0.5**n for n in range(60)], steps=60), 11, module=None, kind=None, severity="warning",
        bare=True, says=("decayed to 1.73e-18", "82 % of the steps"), evidence={"idle_steps": 49},
    ),
    "one_parameter_group": Sample(
        lambda: group(*[0.5**n for n in range(60)]), 11, module="", kind=None, severity="warning", bare=True,
        says=("parameter group 1 of AdamW#0", "the last 29 of 40 steps"),
    ),
    "a_rate_in_place_of_a_factor": Sample(
        lambda: made_with(1e-3, *[1e-6 * (40 - n) / 40 for n in range(40)]), 0, module=None, kind=None,
        severity="warning", bare=True, says=("never exceeds 1e-06", "limit 0.0078", "the square of that one"),
    ),
    "a_rate_in_place_of_a_factor_at_another_rate": Sample(
        lambda: made_with(1e-3, 3e-6), 0, module=None, kind=None, severity="warning", bare=True,
        says=("never exceeds 3e-06", "most likely that is a rate"),
    ),
    "a_step_schedule_advanced_per_batch": Sample(
        lambda: rates(*[0.8 ** (n // 4) for n in range(300)], steps=300), 137, module=None, kind=None,
        severity="warning", bare=True, says=("hardly move the weights", "limit 0.00049"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        warm_up_from_zero, zero_from_the_beginning, small_to_the_end, a_long_tail, too_few_steps, Training,
        exponential_to_a_millionth, cosine, frozen_group, slower_group, noam, a_warm_up_longer_than_the_run,
        the_end_of_a_schedule,
    )
}  # fmt: skip
