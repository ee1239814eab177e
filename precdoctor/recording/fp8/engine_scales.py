"""Scales that frameworks keep to themselves: Transformer Engine's per FP8 operand, DeepSpeed's loss scale.

Read from their documented attributes, which tests know from stand-ins only: neither runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import Tensor, nn

from precdoctor.recording.model import static
from precdoctor.recording.slots.step_batch import Deferred, defer

#: ``fp8_meta`` keys of Transformer Engine, and the operands of each matrix product in the order it keeps them
#: (``transformer_engine/pytorch/constants.py``, ``FP8FwdTensors`` and ``FP8BwdTensors``).
_STATES = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("grad_output", "grad_input")}
ENGINE: Final = "DeepSpeedEngine"
#: What a state of delayed scaling holds: one scale per operand, and a history with a column per operand.
_HELD = ("scale", "amax_history")


def delayed_scaling(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The scale and the amax history of each FP8 operand of a Transformer Engine module under delayed scaling.

    Yields:
        ``input.scale`` (scalar), ``input.amax_history`` (length of the history) and so on; of a module with several
        products ``gemm1.input.scale`` ... Nothing for other modules, and for recipes that keep no history.
    """
    meta: Any = static.module_dict(module).get("fp8_meta")
    if not issubclass(type(meta), dict):
        return
    for key, roles in _STATES.items():
        for held in _HELD:
            values = static.attribute(dict.get(meta, key), held)
            if not issubclass(type(values), Tensor) or not values.dim() or not values.is_floating_point():
                continue
            operands = values.shape[-1]
            for i in range(operands):
                prefix = f"gemm{1 + i // len(roles)}." if operands > len(roles) else ""
                yield f"{prefix}{roles[i % len(roles)]}.{held}", values[..., i]


def loss_scale(modules: Iterable[nn.Module | None]) -> Deferred:
    """The loss scale of a DeepSpeed engine among some modules; None without one, or where it trains without a scale.

    FP16 optimizers of DeepSpeed have it as ``cur_scale``, their own, their scaler's or their scale settings'; 1 where
    none is in force. To be read as a backward pass begins: it is changed before the optimizer inside steps.
    """
    for module in modules:
        if module is None or type(module).__name__ != ENGINE:
            continue
        optimizer = static.attribute(module, "optimizer")
        for holder in ("loss_scale_config", "loss_scaler", None):
            owner = static.attribute(optimizer, holder) if holder is not None else optimizer
            value = static.attribute(owner, "cur_scale")
            if issubclass(type(value), Tensor) and value.numel() == 1:
                return defer(value, by_drain=True)
            if (known := static.number(value)) is not None:
                return known if known != 1 else None
    return None
