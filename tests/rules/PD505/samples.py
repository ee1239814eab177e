"""Second moments that cannot decay."""

from typing import Any

from tests.support.samples import Sample
from tests.support.states import with_moment
from tests.support.training import FACTS, Training


def facts(dtype: str, beta2: float) -> dict[str, Any]:
    """The usual ones, with weights in ``dtype`` under AdamW."""
    roots = [{**r, "parameters": [{**p, "dtype": dtype} for p in r["parameters"]]} for r in FACTS["roots"]]
    group = {**FACTS["optimizers"][0]["groups"][0], "betas": [0.9, beta2]}
    return {**FACTS, "roots": roots, "optimizers": [{**FACTS["optimizers"][0], "groups": [group]}]}


def adam(dtype: str, beta2: float, fall: float = 1.0, steps: int = 20) -> Training:
    """AdamW on weights in ``dtype``; the gradient norm falls by ``fall`` after four steps."""
    run = Training(steps=steps, weight_dtype=dtype, facts=facts(dtype, beta2))
    for step, row in run.step_rows.items():
        row["grad_norm"] = 1.0 if step < 4 else 1.0 / fall
    columns = {"rel_lo": -4, "rel_hist": [4096]}
    return run.change(lambda r: r.update(columns), kind="update")


def in_fp32() -> Training:
    return adam("float32", 0.999, 8.0)


def faster_decay() -> Training:
    return adam("bfloat16", 0.99, 8.0)


def in_fp16() -> Training:
    """FP16's half ulp is below 0.001."""
    return adam("float16", 0.999, 8.0)


def short() -> Training:
    return adam("bfloat16", 0.999, steps=6)


def recorded(steps: int = 40, *, apart: int = 1) -> Training:
    """The state is on record, and in FP16: gradients fall a hundredfold after four steps."""
    run = adam("float32", 0.9999, steps=steps)
    return with_moment(
        run, lambda s, x: (1.0 if s < 4 else 0.01) * x, "float16", beta2=0.9999, forgets=False, apart=apart
    )


def sampled_seldom(run: Training, every: int) -> Training:
    """The same rows, ``every`` steps apart."""
    for rows in run.tensors.values():
        for row in rows:
            row["step"] *= every
    for row in run.step_rows.values():
        row["step"] *= every
    return run


def long_ago() -> Training:
    """Gradients were a hundred times larger for four of 24 samples; exact moments would have forgotten them."""
    return sampled_seldom(recorded(24, apart=4096), 4096)


def wide_state() -> Training:
    """The optimizer keeps FP32 state for its BF16 weights."""
    return with_moment(adam("bfloat16", 0.999, 8.0), lambda _, x: x)


FIRING = {
    "remembers": Sample(long_ago, kind=None, severity="warning", rank=None, bare=True, says=("times too large",)),
    "state_of_another_format": Sample(
        lambda: recorded(), kind=None, severity="info", rank=None, bare=True,
        says=("float16", "The cost depends on how far"),
    ),
    "fallen": Sample(
        lambda: adam("bfloat16", 0.999, 8.0), kind=None, severity="warning", rank=None, bare=True,
        says=("limit 0.00195", "8 times"),
    ),
    "level": Sample(lambda: adam("bfloat16", 0.999), kind=None, severity="info", rank=None, bare=True),
    "fp16_slower": Sample(lambda: adam("float16", 0.9999), kind=None, severity="info", rank=None, bare=True),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (in_fp32, faster_decay, in_fp16, short, wide_state)}
