"""Recomputes the update that an optimizer intended for a weight, to see how much of it was lost.

A lost update is ``round(w + dw) == w`` for the *intended* dw. On pure 16-bit weights the stored difference does not
show it: it is already rounded to zero or about an ulp. So for the optimizers below, dw is recomputed from their state
after the step.

Sources: update formulas of ``torch.optim.SGD``, ``Adam`` and ``AdamW`` (Kingma and Ba, arXiv:1412.6980, algorithm 1;
Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; Reddi et al., ICLR 2018, for amsgrad).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.kernels.adam_update import Adam, wide
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in, state_of

Group = Mapping[str, Any]
State = Mapping[str, Any]
#: Key that a parameter's bias corrections are added to its state under, if they were computed for all at once.
_CORRECTED = "precdoctor_corrections"


def _adam(_before: Tensor, _grad: Tensor, state: State, group: Group) -> Adam | None:
    """Return the update of Adam or AdamW, from the moments after the step: the step divides by exactly these."""
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"]) if group.get("amsgrad") else state["exp_avg_sq"]
    t, decay = _number(state["step"]), group["weight_decay"]
    if not isinstance(t, Tensor) and t == 0:
        return None  # fused, and the scaler has skipped its first step
    decays = group.get("decoupled_weight_decay", False) and decay != 0
    factor, root = state[_CORRECTED] if _CORRECTED in state else _corrections(t, group)
    rate = _number(group["lr"])
    return Adam(state["exp_avg"], second, factor, root, group["eps"], rate * decay if decays else None)


def _corrections(t: Any, group: Group) -> tuple[Any, Any]:
    """Return factor and root of Adam's update after ``t`` steps; ``t`` is a number or a tensor of any shape."""
    beta1, beta2 = map(_number, group["betas"])
    return -_number(group["lr"]) / (1 - beta1**t), (1 - beta2**t) ** 0.5


def corrections_on_device(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Tensor, Tensor]]:
    """Compute Adam's bias corrections for all parameters in a few launches, if step counts are on a device.

    Returns:
        By ``id`` of a step count, the result of :func:`_corrections`; empty for other optimizers.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    if _KNOWN.get(type(optimizer)) not in (_adam, _adamw):
        return found
    for group in groups_of(optimizer):
        counts = [state_of(optimizer, p).get("step") for p in parameters_in(group)]
        on_device = [t for t in counts if type(t) is Tensor and not t.is_cpu and t.dim() == 0]
        if len(on_device) > 1 and len({(t.device, t.dtype) for t in on_device}) == 1:
            factors, roots = _corrections(torch.stack(on_device), group)
            found |= zip(map(id, on_device), zip(factors.unbind(), roots.unbind(), strict=True), strict=True)
    return found


def _number(x: Any) -> Any:
    """Return a host tensor as a float; a device tensor stays a tensor, because reading it would wait."""
    return float(x.detach()) if isinstance(x, Tensor) and x.is_cpu else x


def _adamw(before: Tensor, grad: Tensor, state: State, group: Group) -> Adam | None:
    return _adam(before, grad, state, {**group, "decoupled_weight_decay": True})


def _sgd(before: Tensor, grad: Tensor, state: State, group: Group) -> Tensor | None:
    """Return the update of SGD with momentum, dampening, Nesterov and weight decay, from the buffer after the step."""
    direction = wide(-grad if group.get("maximize") else grad)
    if group["weight_decay"] != 0:
        direction = direction + group["weight_decay"] * wide(before)
    if group["momentum"] != 0:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            return None
        direction = direction + group["momentum"] * wide(buffer) if group["nesterov"] else wide(buffer)
    return -group["lr"] * direction


_KNOWN: dict[type, Callable[[Tensor, Tensor, State, Group], Tensor | Adam | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
}


def intention_of(optimizer: torch.optim.Optimizer) -> str:
    """Return ``exact`` if dw is recomputed from optimizer state, ``gradient`` if the gradient stands for it."""
    return "exact" if type(optimizer) in _KNOWN else "gradient"


def intended_update(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    grad: Tensor,
    before: Tensor,
    group: Group,
    corrections: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> Tensor | Adam | None:
    """Return the update of ``parameter`` that the last step intended; FP32 or wider, with the shape of ``before``.

    Args:
        optimizer: after its step.
        parameter: one of its parameters.
        grad: its gradient in that step.
        before: a copy of its values before the step, from ``tensor_leaves.plain``: of this rank's shard.
        group: its parameter group.
        corrections: result of :func:`corrections_on_device`.

    Returns:
        dw; for Adam as its terms. For other optimizers the gradient, which is zero where dw is. None if the gradient
        has no memory of its own.
    """
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    local = tensor_leaves.plain(grad.detach())
    formula = _KNOWN.get(type(optimizer))
    if formula is None or local is None:
        return local
    own = state_of(optimizer, parameter)
    state = {key: _local(value) for key, value in own.items()}
    if (both := corrections.get(id(own.get("step")))) is not None:
        state[_CORRECTED] = both
    exact = formula(before, local, state, group)
    return local if exact is None else exact


def _local(value: Any) -> Any:
    """Return this rank's part of a sharded tensor; other values as they are."""
    return tensor_leaves.plain(value) if issubclass(type(value), Tensor) else value
