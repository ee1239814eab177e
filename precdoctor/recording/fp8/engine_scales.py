"""FP8 scales inside modules of libraries: Transformer Engine's per operand, torchao's of fake quantisers.

Read from their attributes (Transformer Engine 2.18, torchao 0.18). Transformer Engine needs a GPU, so tests use
stand-ins for its modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from precdoctor.recording.model import static

#: Keys of Transformer Engine's ``fp8_meta``, and the operands of each matrix product in the order of its states
#: (``transformer_engine/pytorch/constants.py``, ``FP8FwdTensors`` and ``FP8BwdTensors``).
_STATES = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("grad_output", "grad_input")}
#: For an operation of ``transformer_engine.pytorch.ops``: keys of ``_fp8_metas``, and below each the state's key and
#: the roles in the order of the quantisers (``ops/basic/basic_linear.py``).
_OP_STATES = {"forward": ("scaling_fwd", ("input", "weight")), "backward": ("scaling_bwd", ("grad_output",))}
#: A module with none of these attributes has no scales to read.
HOLDERS = frozenset(("fp8_meta", "_fp8_metas", "scale"))
#: Attributes of a state of delayed scaling: one scale per operand, and a history with a column per operand.
_HELD = ("scale", "amax_history")


def delayed_scaling(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the scale and the amax history of each FP8 operand of a Transformer Engine module under delayed scaling.

    Their names are ``input.scale`` (a scalar), ``input.amax_history`` (a vector) and so on; for a module with several
    products ``gemm1.input.scale`` ... Nothing for other modules, and for recipes without a history.
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
    """Whether a module of Transformer Engine has FP8 scales."""
    meta: Any = static.module_dict(module).get("fp8_meta")
    metas: Any = static.module_dict(module).get("_fp8_metas")
    states: list[Any] = list(dict.values(metas)) if issubclass(type(metas), dict) else [meta]
    return any(issubclass(type(state), dict) and not dict.keys(state).isdisjoint(_STATES) for state in states)


def _of_state(state: Any, roles: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales and histories of one state, by operand."""
    for held in _HELD:
        values = static.attribute(state, held)
        if not issubclass(type(values), Tensor) or not values.dim() or not values.is_floating_point():
            continue
        operands = values.shape[-1]
        for i in range(operands):
            prefix = f"gemm{1 + i // len(roles)}." if operands > len(roles) else ""
            yield f"{prefix}{roles[i % len(roles)]}.{held}", values[..., i]


def fake_quantisation(module: nn.Module) -> Tensor | None:
    """Return the divisors of the last input of torchao's integer fake quantiser: one per tensor, row, group or token.

    None for any other module.
    """
    if type(module).__name__ != "IntxFakeQuantizer":
        return None
    scale = static.module_dict(module).get("scale")
    return scale.detach() if type(scale) is Tensor and scale.is_floating_point() and scale.numel() else None
