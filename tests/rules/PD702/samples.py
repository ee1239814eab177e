"""Switches that lower the precision of matrix products."""

from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, normal

STOCK = {
    "float32_matmul_precision": "highest",
    "matmul_allow_tf32": False,
    "cudnn_allow_tf32": True,
    "matmul_allow_fp16_reduced_precision_reduction": True,
    "matmul_allow_fp16_accumulation": False,
}
H100 = {"type": "cuda", "name": "NVIDIA H100", "capability": [9, 0]}


def on(device: Any, dtype: str = "float32", autocast: str | None = None, width: int = 64, **flags: Any) -> Training:
    """A run on this device whose layers add up ``width`` products and give ``dtype``."""
    roots = [{**r, "parameters": [{**p, "shape": [64, width]} for p in r["parameters"]]} for r in FACTS["roots"]]
    run = Training(dtype=dtype, facts={**FACTS, "roots": roots, "device": device, "flags": {**STOCK, **flags}})
    for row in run.step_rows.values():
        row["autocast_dtype"] = autocast
    return run


def wide_head(run: Training) -> Training:
    """Under autocast, but for its head."""
    return run.change(lambda r: r.update(dtype="float32"), kind="output", module="head")


def near_the_end(run: Training) -> Training:
    """The output of one layer reaches a quarter of FP16's largest number."""
    change = lambda r: r.update(normal(6000.0, "float16"), dtype="float16")  # noqa: E731
    return run.change(change, kind="output", module="blocks.0.mlp.down")


def all_in_fp32() -> Training:
    """TF32 throughout is a choice."""
    return on(H100, float32_matmul_precision="high", matmul_allow_tf32=True)


def a_head_in_fp32() -> Training:
    return wide_head(on(H100, "bfloat16", "bfloat16"))


def before_tf32() -> Training:
    volta = {**H100, "capability": [7, 0]}
    return wide_head(on(volta, "bfloat16", "bfloat16", float32_matmul_precision="high"))


def short_sums() -> Training:
    return near_the_end(on(H100, "float16", "float16"))


def far_from_the_end() -> Training:
    return on(H100, "float16", "float16", width=4096)


def on_a_cpu() -> Training:
    return near_the_end(on({"type": "cpu"}, "float16", "float16", width=4096))


FIRING = {
    "head_in_tf32": Sample(
        lambda: wide_head(on(H100, "bfloat16", "bfloat16", float32_matmul_precision="high")),
        module="head", kind="output", severity="info", bare=True, says=("TF32", "11 significant bits"),
    ),
    "partial_sums": Sample(
        lambda: near_the_end(on(H100, "float16", "float16", width=4096)),
        module="blocks.0.mlp.down", severity="warning", bare=True, says=("limit 2)", "4,096 products"),
    ),
    "fp16_accumulator": Sample(
        lambda: on(H100, "float16", "float16", width=4096, matmul_allow_fp16_accumulation=True),
        severity="warning", bare=True, says=("limit 2,048",),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (all_in_fp32, a_head_in_fp32, before_tf32, short_sums, far_from_the_end, on_a_cpu)}
