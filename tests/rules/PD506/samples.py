"""Second moments that hold zeros where there is a gradient."""

import numpy as np

from tests.support.samples import Sample
from tests.support.states import with_moment
from tests.support.training import FACTS, Training, histogram, normal, tensor


def adam(eps: float, **more: object) -> Training:
    """A run of AdamW with this eps."""
    group = {**FACTS["optimizers"][0]["groups"][0], "eps": eps}
    return Training(facts={**FACTS, "optimizers": [{**FACTS["optimizers"][0], "groups": [group], **more}]})


def half(sigma: float, eps: float = 1e-5) -> Training:
    """Moments in FP16 of gradients of this size."""
    return with_moment(adam(eps), lambda _, x: sigma * x, "float16")


def in_fp32() -> Training:
    """Squares of 1e-5 are far from FP32's end."""
    return with_moment(adam(1e-8), lambda _, x: 1e-5 * x)


def large_gradients() -> Training:
    """FP16 holds squares of gradients of order 10."""
    return half(10.0)


def rows_never_looked_up() -> Training:
    """Zeros of the moment where the gradient is zero: embedding rows."""
    alive = np.arange(4096) < 512
    return with_moment(adam(1e-5), lambda _, x: 10.0 * x * alive, "float16")


def first_steps_left_out() -> Training:
    """Moments that stay zero at first (SOAP, AdaShift), of gradients whose squares the format holds."""
    run = another_optimizer(0.5)
    for step, rows in run.tensors.items():
        rows[:] = [r for r in rows if r["kind"] != "opt_state"]
        if step % 2 == 0:
            row = tensor(step, "opt_state", "head", len(rows), name="weight.exp_avg_sq")
            rows.append(row | {"exp_lo": None, "exp_hist": None, "amin_nonzero": None} | histogram(np.zeros(4096)))
    return run


def far_below_eps() -> Training:
    """Squares of 1e-24 are zero in FP32, and eps outweighs them anyway."""
    tiny = np.arange(4096) < 1024
    return with_moment(adam(1e-8), lambda _, x: np.where(tiny, 1e-24, 1e-3) * x)


def another_optimizer(sigma: float = 1e-4) -> Training:
    """Not one of torch's, with FP16 state."""
    return with_moment(adam(1e-5, **{"class": "LeanAdam"}), lambda _, x: sigma * x, "float16")


def others_lose_a_few() -> Training:
    """An optimizer that may bound its steps, and a twentieth without a second moment."""
    return another_optimizer(0.5)


def a_momentum_called_v() -> Training:
    """Nesterov's velocity has signs: no mean of squares."""
    run = another_optimizer()
    for step, rows in run.tensors.items():
        rows[:] = [r for r in rows if r["kind"] != "opt_state"]
        signed = np.random.default_rng(step).normal(0.0, 1e-7, 4096).astype(np.float16).astype(np.float64)
        row = tensor(step, "opt_state", "head", len(rows), name="weight.v", dtype="float16")
        rows.append(row | {"exp_lo": None, "exp_hist": None} | histogram(signed))
    return run


def both_moments(zero: range = range(0), first: float = 1.0) -> Training:
    """FP32 moments of gradients of 1e-4.

    Args:
        zero: steps in which a quarter of the elements have no gradient, and a second moment of zero.
        first: what the first moment of that quarter is multiplied with in them.
    """
    quarter = np.arange(4096) < 1024
    run = with_moment(adam(1e-8), lambda step, x: 1e-4 * x * np.where(quarter & (step in zero), 0.0, 1.0))
    for step, rows in run.tensors.items():
        for row in [r for r in rows if r["kind"] == "opt_state"]:
            kept = np.where(quarter & (step in zero), [[first], [0.0]], 1.0)
            draws = 1e-4 * np.random.default_rng(step).normal(0.0, 1.0, 4096)
            m = tensor(step, "opt_state", "head", len(rows), name="weight.exp_avg", amin_nonzero=None, exp_lo=None)
            rows.append(m | {"exp_hist": None} | histogram(draws * kept[0]))
            row |= histogram(1e-8 * draws**2 * kept[1])
    return run


def resumed_from_half() -> Training:
    """After step 6 a quarter of the second moments is zero; the first ones are what they were."""
    return both_moments(zero=range(6, 7))


def a_long_step() -> Training:
    """No zeros after the first step that was recorded, but a step of 400 learning rates."""
    run = both_moments()
    return run.change(lambda r: r.update(normal(0.1)), kind="update", module="head", step=6)


def rows_without_either() -> Training:
    """Embedding rows that no batch has held yet: both moments are zero."""
    return both_moments(zero=range(12), first=0.0)


def first_moments_below_eps() -> Training:
    return both_moments(zero=range(12), first=1e-9)


def longest_of_adam() -> Training:
    """Seven learning rates after a long silence, as the moments allow."""
    run = both_moments()
    return run.change(lambda r: r.update(normal(7e-3 / 4)), kind="update", module="head", step=6)


FIRING = {
    "resumed_from_half": Sample(
        resumed_from_half, module="head", kind="opt_state", step=6, severity="warning", bare=True,
        says=("25 %", "After step 6", "1,024 elements", "FP16"),
    ),
    "a_long_step": Sample(
        a_long_step, module="head", kind="update", step=6, severity="warning", bare=True,
        says=("more than Adam can", "7.27 times at most"),
    ),
    "small": Sample(
        lambda: half(1e-3), module="head", kind="opt_state", severity="warning",
        says=("float16", "limit 1 %", "times the learning rate"),
    ),
    "eps_is_zero_too": Sample(
        lambda: half(1e-4, 1e-8), module="head", severity="warning", says=("a division by zero",)
    ),
    "another_optimizer": Sample(
        another_optimizer, module="head", severity="warning", says=("Where LeanAdam divides", "limit 5 %")
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        in_fp32, first_steps_left_out, large_gradients, rows_never_looked_up, far_below_eps, others_lose_a_few,
        a_momentum_called_v, rows_without_either, first_moments_below_eps, longest_of_adam,
    )
}  # fmt: skip
