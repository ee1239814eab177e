"""Errors beside FP32, as precdoctor shadow leaves them."""

import json
from typing import Any

from tests.support.samples import Sample
from tests.support.training import FORWARD, ROOT, Training

U = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def scan(number: str, step: int, data: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """One event."""
    row = {"id": number, "rank": 0, "step": step, "time_ns": step, "event": "scan", "root": ROOT}
    return {**row, **columns, "data": json.dumps(data)}


def shadowed(dtype: str = "bfloat16", reference: str = "float32", **call: Any) -> Training:
    """A healthy training, compared at steps 0 and 1: every layer 0.7 u off by itself, a little more all the way."""
    run = Training(dtype=dtype)
    for step in (0, 1):
        data = {"what": "shadow", "reference": reference, "outcome": "compared", "formats": ["float32", dtype],
                "reproduced": True, "backward": "compared", "same_draws": True, "changed_arguments": [],
                "calls_left_out": 0, **call}  # fmt: skip
        run.events.append(scan(f"0-s{step}", step, data))
        for order, (module, kind) in enumerate(FORWARD):
            parent = module.rpartition(".")[0]
            point = {"name": "", "dtype": dtype, "numel": 4096, "local": 0.7 * U[dtype]}
            layer = {
                "what": "layer", "order": order, "class": kind, "parent": parent, "calls": 1, "leaf": True,
                "output": {**point, "accumulated": (1.0 + 0.1 * order) * U[dtype], "given": 0.9 * U[dtype]},
                "weight_grad": {**point, "name": "weight"},
            }  # fmt: skip
            run.events.append(scan(f"0-s{step}.{order}", step, layer, module=module, parent_id=f"0-s{step}"))
    return run


def spoil(run: Training, module: str, kind: str, step: int = 1, **errors: float) -> Training:
    """Change the errors of one tensor; in u of BF16."""
    for event in run.events:
        if event.get("module") == module and event["step"] == step:
            data = json.loads(event["data"])
            found = data.setdefault(kind, {"name": "0", "dtype": "bfloat16", "numel": 4096})
            found.update({k: v * U["bfloat16"] for k, v in errors.items()})
            event["data"] = json.dumps(data)
    return run


def healthy() -> Training:
    return shadowed()


def above_the_first_limit() -> Training:
    return spoil(shadowed(), "blocks.0.attn.proj", "output", local=6.0)


def far_off_all_the_way_but_not_by_one_layer() -> Training:
    """Depth adds up: each layer gives the errors on."""
    run = shadowed()
    for order, (module, _) in enumerate(FORWARD):
        spoil(run, module, "output", accumulated=10.0 * (order + 1), given=10.0 * (order + 0.5))
    return run


def sums_in_fp32() -> Training:
    """Against FP64 the rounding of long sums counts."""
    run = shadowed("float32", "float64")
    return spoil(run, "head", "output", local=100.0 * U["float32"] / U["bfloat16"])


FIRING = {
    "layer": Sample(
        lambda: spoil(shadowed(), "blocks.0.norm", "output", local=310.0, accumulated=310.0),
        1, "blocks.0.norm", "output", severity="warning", says=("310 u off", "limit 8", "121 %"),
        evidence={"own_error_in_u": 310.0, "bit_for_bit": True}, bare=True,
    ),
    "code-between": Sample(
        lambda: spoil(shadowed(), "blocks.0.attn.proj", "input", local=40.0),
        1, "blocks.0.attn", "input", severity="warning", says=("before `blocks.0.attn.proj`",), bare=True,
    ),
    "gradient": Sample(
        lambda: spoil(shadowed(), "blocks.0.mlp.up", "weight_grad", step=0, local=90.0),
        0, "blocks.0.mlp.up", "weight_grad", severity="warning", says=("gradient of weight",), bare=True,
    ),
    "cancellation": Sample(
        lambda: spoil(shadowed(), "blocks.0.mlp.down", "output", accumulated=80.0, given=0.8),
        1, "blocks.0.mlp.down", "output", severity="warning", says=("0.8 u into 80 u", "100 times"), bare=True,
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (healthy, above_the_first_limit, far_off_all_the_way_but_not_by_one_layer, sums_in_fp32)
}  # fmt: skip
