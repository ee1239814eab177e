"""Scales that frameworks keep to themselves: Transformer Engine's per FP8 operand, torchao's of fake quantisers.

Read from their attributes (Transformer Engine 2.18, torchao 0.18); tests know those of Transformer Engine from
stand-ins only, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from precdoctor.recording.model import static

#: ``fp8_meta`` keys of Transformer Engine, and the operands of each matrix product in the order it keeps them
#: (``transformer_engine/pytorch/constants.py``, ``FP8FwdTensors`` and ``FP8BwdTensors``).
_STATES = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("grad_output", "grad_input")}
#: The same of an operation of ``transformer_engine.pytorch.ops``: keys of ``_fp8_metas``, and below each the state's
#: key and the roles in the order of the quantisers (``ops/basic/basic_linear.py``).
_OP_STATES = {
    "forward": ("scaling_fwd", ("input", "weight")),
    "backward": ("scaling_bwd", ("grad_output",)),
}
#: Attributes without one of which a module has no scales that are read here.
HOLDERS = frozenset(("fp8_meta", "_fp8_metas", "scale"))
#: What a state of delayed scaling holds: one scale per operand, and a history with a column per operand.
_HELD = ("scale", "amax_history")


def delayed_scaling(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The scale and the amax history of each FP8 operand of a Transformer Engine module under delayed scaling.

    Yields:
        ``input.scale`` (scalar), ``input.amax_history`` (length of the history) and so on; of a module with several
        products ``gemm1.input.scale`` ... Nothing for other modules, and for recipes that keep no history.
    """
    meta: Any = static.module_dict(module).get("fp8_meta")
    metas: Any = static.module_dict(module).get("_fp8_metas")
    if issubclass(type(meta), dict):
        for key, roles in _STATES.items():
            yield from _of_state(dict.get(meta, key), roles)
    if issubclass(type(metas), dict):
        for mode, (key, roles) in _OP_STATES.items():
            own: Any = dict.get(metas, mode)
            if issubclass(type(own), dict):
                yield from _of_state(dict.get(own, key), roles)


def quantises(module: nn.Module) -> bool:
    """Whether it is a module of Transformer Engine that has been given a recipe."""
    meta: Any = static.module_dict(module).get("fp8_meta")
    metas: Any = static.module_dict(module).get("_fp8_metas")
    states: list[Any] = list(dict.values(metas)) if issubclass(type(metas), dict) else [meta]
    return any(issubclass(type(state), dict) and not dict.keys(state).isdisjoint(_STATES) for state in states)


def _of_state(state: Any, roles: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for held in _HELD:
        values = static.attribute(state, held)
        if not issubclass(type(values), Tensor) or not values.dim() or not values.is_floating_point():
            continue
        operands = values.shape[-1]
        for i in range(operands):
            prefix = f"gemm{1 + i // len(roles)}." if operands > len(roles) else ""
            yield f"{prefix}{roles[i % len(roles)]}.{held}", values[..., i]


def fake_quantisation(module: nn.Module) -> Tensor | None:
    """What torchao's fake quantiser of integers divided its last input by: one per tensor, row, group or token."""
    if type(module).__name__ != "IntxFakeQuantizer":
        return None
    scale = static.module_dict(module).get("scale")
    return scale.detach() if type(scale) is Tensor and scale.is_floating_point() and scale.numel() else None
