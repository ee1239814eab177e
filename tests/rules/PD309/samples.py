"""Gradients unscaled once, twice and not at all, clipped and accumulated."""

import json
from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.training import Training, normal


def given(factor: Callable[[int], float], *, scale: float = 8192.0, clip: float | None = None) -> Training:
    """The optimizer gets this factor of the unscaled gradients, which are of RMS 0.01."""
    run = Training(dtype="float16", scale=scale)
    for step, row in run.step_rows.items():
        row.update(clip_norm=clip, clipped_before_unscale=None if clip is None else False)
        run.change(lambda r: r.update(normal(0.01 * scale)), kind="weight_grad", step=step)
        run.change(lambda r: r.update(normal(0.01 * factor(int(r["step"])))), kind="weight_grad_step", step=step)
    return run


def once() -> Training:
    return given(lambda _: 1.0)


def clipped() -> Training:
    """To a norm that is now and then a factor of the scale below what it was."""
    return given(lambda s: (0.5, 0.02, 1 / 8192, 0.003)[s % 4], clip=1.0)


def by_hand() -> Training:
    """Divided by hand, clipped from a norm of 4 to 1, and divided once more by the scaler."""
    run = given(lambda _: 0.25 / 8192, clip=1.0)
    for row in run.step_rows.values():
        row.update(grad_norm=4.0)
    return run


def divided_by_the_micro_steps() -> Training:
    """Sixteen of them, and the scale is sixteen as well."""
    return given(lambda _: 1 / 16, scale=16.0)


def left_scaled() -> Training:
    """The learning rate has been divided instead."""
    return given(lambda _: 8192.0)


def again(steps: int) -> Training:
    """The recorder has counted several ``unscale_`` calls on the gradients of so many of twelve steps."""
    run = once()
    run.step_rows[0].update(loss_scale=None)  # the scaler is used from step 1 on
    data = {"what": "unscaled-again", "optimizer": "AdamW#0", "times": 4, "steps": steps, "of": 12}
    run.events.append({"event": "warning", "id": "0-w0", "step": 11, "root": "GPT#0", "data": json.dumps(data)})
    return run


def dropped(steps: int) -> Training:
    """What ``scaler.scale`` returned went nowhere, on so many of twelve steps."""
    run = once()
    run.step_rows[0].update(loss_scale=1.0)
    data = {"what": "scale-unused", "steps": steps, "of": 12}
    row = {"event": "warning", "id": "0-w0", "step": 11, "file": "train.py", "line": 36, "data": json.dumps(data)}
    run.events.append(row)
    return run


def mixed(steps: int) -> Training:
    """A second loss went into ``backward`` without the scale, on so many of twelve steps."""
    run = once()
    data = {"what": "mixed-scale", "optimizer": "AdamW#0", "steps": steps, "of": 12}
    row = {"event": "warning", "id": "0-w0", "step": 11, "file": "train.py", "line": 36, "data": json.dumps(data)}
    run.events.append(row)
    return run


def mixed_by_accident() -> Training:
    return mixed(2)


def divided(steps: int, *, factor: float = 1 / 4096, passes: int = 4) -> Training:
    """The recorder has measured this factor after each backward pass, on so many of twelve steps."""
    run = Training()
    data = {"what": "rescaled-sum", "optimizer": "AdamW#0", "factor": factor, "passes": passes, "of": 12}
    data |= {"steps": steps}
    run.events.append({"event": "warning", "id": "0-w0", "step": 11, "root": "GPT#0", "data": json.dumps(data)})
    return run


def divided_now_and_then() -> Training:
    return divided(3)


def divided_by_little() -> Training:
    return divided(12, factor=0.9)


def multiplied() -> Training:
    return divided(12, factor=4.0)


def dropped_now_and_then() -> Training:
    """Another loss of the same step is not under the scaler."""
    return dropped(3)


def now_and_then() -> Training:
    return again(3)


FIRING = {
    "with_each_micro_batch": Sample(
        lambda: again(12),
        1,
        module="",
        bare=True,
        says=("unscaled 4 times", "limit 80 %"),
        evidence={"unscaled_times": 4, "given_share": 0.25},
    ),
    "divided_by_hand": Sample(
        lambda: divided(12),
        module="",
        kind=None,
        bare=True,
        says=("divided by 4096 after each of 4", "limit 80 %", "counts 0.000244", "1.46e-11"),
        evidence={"factor": 1 / 4096, "unscaled_times": 4},
    ),
    "divided_by_the_micro_steps_each_time": Sample(
        lambda: divided(12, factor=0.25),
        module="",
        kind=None,
        bare=True,
        says=("divided by 4 after each of 4", "1.33 of 4"),
    ),
    "scaled_loss_dropped": Sample(
        lambda: dropped(12),
        1,
        kind=None,
        bare=True,
        says=("8192", "train.py:36", "limit 80 %"),
        evidence={"unscaled_loss_share": 1.0, "given_share": 1 / 8192},
    ),
    "second_loss_unscaled": Sample(
        lambda: mixed(12),
        0,
        kind=None,
        bare=True,
        says=("8192", "train.py:36", "12 steps of 12", "limit 3", "counts 0.000122 of"),
        evidence={"mixed_share": 1.0, "given_share": 1 / 8192},
    ),
    "second_loss_unscaled_now_and_then": Sample(lambda: mixed(3), 0, kind=None, bare=True, says=("3 steps of 12",)),
    "by_hand_before_a_clip": Sample(by_hand, 0, kind=None, bare=True, says=("unscaled twice", "gets 0.000122 of them")),
    "twice": Sample(
        lambda: given(lambda _: 1 / 8192), 0, kind=None, bare=True, says=("unscaled twice", "8192", "0.000122", "limit")
    ),
}
HEALTHY = {
    f.__name__: f
    for f in (
        once, now_and_then, dropped_now_and_then, mixed_by_accident, divided_now_and_then, divided_by_little,
        multiplied, clipped, divided_by_the_micro_steps, left_scaled,
    )
}  # fmt: skip
