"""What the optimizer meant to add to a weight, and whether any of it stuck.

A lost update is ``round(w + dw) == w`` for the *intended* dw. The stored difference cannot tell on pure 16-bit weights:
it is already rounded to zero or about an ulp. So where an optimizer's arithmetic is known here, dw is computed again
from the state they left behind.

Sources: update formulas of ``torch.optim.SGD``, ``Adam`` and ``AdamW`` (Kingma and Ba, arXiv:1412.6980, algorithm 1;
Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; Reddi et al., ICLR 2018, for amsgrad).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.kernels.adam_update import Adam, wide
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.model.optimizer_contents import state_of

Group = Mapping[str, Any]
State = Mapping[str, Any]


def _adam(_before: Tensor, _grad: Tensor, state: State, group: Group) -> Adam | None:
    """Adam and AdamW from the moments as they were after the step (the step divides by exactly these)."""
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    beta1, beta2 = map(_number, group["betas"])
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"]) if group.get("amsgrad") else state["exp_avg_sq"]
    t, rate, decay = _number(state["step"]), _number(group["lr"]), group["weight_decay"]
    if not isinstance(t, Tensor) and t == 0:
        return None  # fused, and a scaler kept it from taking its first step
    decays = group.get("decoupled_weight_decay", False) and decay != 0
    factor, root = -rate / (1 - beta1**t), (1 - beta2**t) ** 0.5
    return Adam(state["exp_avg"], second, factor, root, group["eps"], rate * decay if decays else None)


def _number(x: Any) -> Any:
    """A number of the host's, exactly; one on a device would be waited for and stays there."""
    return float(x.detach()) if isinstance(x, Tensor) and x.is_cpu else x


def _adamw(before: Tensor, grad: Tensor, state: State, group: Group) -> Adam | None:
    return _adam(before, grad, state, {**group, "decoupled_weight_decay": True})


def _sgd(before: Tensor, grad: Tensor, state: State, group: Group) -> Tensor | None:
    """SGD with momentum, dampening, Nesterov and weight decay; the buffer is the one after the step."""
    direction = wide(-grad if group.get("maximize") else grad)
    if group["weight_decay"] != 0:
        direction = direction + group["weight_decay"] * wide(before)
    if group["momentum"] != 0:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            return None
        direction = direction + group["momentum"] * wide(buffer) if group["nesterov"] else wide(buffer)
    update: Tensor = -group["lr"] * direction
    return update


_KNOWN: dict[type, Callable[[Tensor, Tensor, State, Group], Tensor | Adam | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
}


def intention_of(optimizer: torch.optim.Optimizer) -> str:
    """``exact`` where dw is recomputed from optimizer state, ``gradient`` where a non-zero gradient stands for it."""
    return "exact" if type(optimizer) in _KNOWN else "gradient"


def intended_update(
    optimizer: torch.optim.Optimizer, parameter: Tensor, before: Tensor, group: Group
) -> Tensor | Adam | None:
    """The update the step that has just ended meant to add to ``parameter``; float, the shape of ``before``.

    Args:
        optimizer: after its step.
        parameter: one of its parameters, with the gradient of that step still there.
        before: a copy of its values from before the step, as ``leaves.plain`` gives them: of this rank's shard.
        group: the parameter group it is in.

    Returns:
        dw, of Adam in its terms; for optimizers not known here the gradient itself, whose zeros are those of dw; null
        where neither exists.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    local = tensor_leaves.plain(grad.detach())
    formula = _KNOWN.get(type(optimizer))
    if formula is None or local is None:
        return local
    state = {key: _local(value) for key, value in state_of(optimizer, parameter).items()}
    exact = formula(before, local, state, group)
    return local if exact is None else exact


def _local(value: Any) -> Any:
    """Of a sharded tensor this rank's part."""
    return tensor_leaves.plain(value) if issubclass(type(value), Tensor) else value
