"""Products of float8 tensors and how they are added up."""

from typing import Any

import numpy as np

from tests.support.fp8 import current, draws, in_fp8
from tests.support.samples import Sample
from tests.support.training import FACTS, ROOT, Training

UP = "blocks.0.mlp.up"
H100 = {"type": "cuda", "name": "NVIDIA H100", "capability": [9, 0]}
B200 = {"type": "cuda", "name": "NVIDIA B200", "capability": [10, 0]}


def magnitudes(seed: int) -> Any:
    """Of Gaussian elements, cast at the scale of their amax."""
    draw = draws(seed)
    return current(lambda s: np.abs(draw(s)))


def product(signs: int = 1, device: Any = H100, **facts: Any) -> Training:
    """A layer in FP8 whose forward product adds up 4096 terms, of both signs or of one."""
    casts = {(UP, name): magnitudes(i) for i, name in enumerate(("input", "weight"))} if signs == 1 else None
    run = in_fp8(casts=casts)
    stock = {"root": ROOT, "module": UP, "backward": False, "operands": ["input", "weight"], "fast_accum": True}
    dtypes = ["float8_e4m3fn", "float8_e4m3fn"]
    run.facts = {**FACTS, "device": device, "fp8_products": [{**stock, "dtypes": dtypes, "terms": 4096, **facts}]}
    return run


def both_signs() -> Training:
    return product(signs=2)


def long_sums_of_both_signs() -> Training:
    return product(signs=2, terms=32768)


def promoted() -> Training:
    """The flag is off."""
    return product(fast_accum=False)


def short_sums() -> Training:
    return product(terms=512)


def features_of_one_sign() -> Training:
    """What follows a ReLU, times a weight without a mean."""
    run = in_fp8(casts={(UP, "input"): magnitudes(3)})
    run.facts = product().facts
    return run


def wide_accumulator() -> Training:
    return product(device=B200)


def cast_elsewhere() -> Training:
    """Nothing is recorded of one operand."""
    return product(operands=["input", None])


FIRING = {
    "one_sign": Sample(
        product, module=UP, kind="fp8_operand", severity="warning",
        says=("4,096", "`use_fast_accum=True`", "limit 1 %", "limit 1)", "14 bits"),
    ),
    "on_a_cpu": Sample(
        lambda: product(device={"type": "cpu"}), module=UP, severity="info", says=("This device adds up in FP32",)
    ),
    "backward": Sample(
        lambda: product(backward=True, terms=65536), severity="warning", says=("backward pass", "65,536")
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        both_signs, long_sums_of_both_signs, promoted, short_sums, features_of_one_sign, wide_accumulator,
        cast_elsewhere,
    )
}  # fmt: skip
