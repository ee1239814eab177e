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

from precdoctor.recording import leaves

Group = Mapping[str, Any]
State = Mapping[str, Any]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _adam(before: Tensor, _grad: Tensor, state: State, group: Group) -> Tensor | None:
    """Adam and AdamW from the moments as they were after the step (the step divides by exactly these)."""
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    beta1, beta2 = group["betas"]
    second = state.get("max_exp_avg_sq", state["exp_avg_sq"]) if group.get("amsgrad") else state["exp_avg_sq"]
    t = state["step"]
    if isinstance(t, Tensor) and t.is_cpu:
        t = float(t)  # exact; on a device it would be waited for
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    # In place wherever the tensor is our own: on a CPU a new one costs more, in page faults, than the arithmetic on it.
    denominator = _wide(second).sqrt().div_(correction2**0.5).add_(group["eps"])
    update = _wide(state["exp_avg"]).mul(-group["lr"] / correction1).div_(denominator)
    if group.get("decoupled_weight_decay", False) and group["weight_decay"] != 0:
        update.sub_(torch.mul(_wide(before), group["lr"] * group["weight_decay"], out=denominator))
    return update


def _adamw(before: Tensor, grad: Tensor, state: State, group: Group) -> Tensor | None:
    return _adam(before, grad, state, {**group, "decoupled_weight_decay": True})


def _sgd(before: Tensor, grad: Tensor, state: State, group: Group) -> Tensor | None:
    """SGD with momentum, dampening, Nesterov and weight decay; the buffer is the one after the step."""
    direction = _wide(-grad if group.get("maximize") else grad)
    if group["weight_decay"] != 0:
        direction = direction + group["weight_decay"] * _wide(before)
    if group["momentum"] != 0:
        buffer = state.get("momentum_buffer")
        if buffer is None:
            return None
        direction = direction + group["momentum"] * _wide(buffer) if group["nesterov"] else _wide(buffer)
    update: Tensor = -group["lr"] * direction
    return update


_KNOWN: dict[type, Callable[[Tensor, Tensor, State, Group], Tensor | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
}


def intention_of(optimizer: torch.optim.Optimizer) -> str:
    """``exact`` where dw is recomputed from optimizer state, ``gradient`` where a non-zero gradient stands for it."""
    return "exact" if type(optimizer) in _KNOWN else "gradient"


def intended_update(optimizer: torch.optim.Optimizer, parameter: Tensor, before: Tensor, group: Group) -> Tensor | None:
    """The update the step that has just ended meant to add to ``parameter``; float, the shape of ``before``.

    Args:
        optimizer: after its step.
        parameter: one of its parameters, with the gradient of that step still there.
        before: a copy of its values from before the step, as ``leaves.plain`` gives them: of this rank's shard.
        group: the parameter group it is in.

    Returns:
        dw; for optimizers not known here the gradient itself, whose zeros are those of dw; null where neither exists.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    local = leaves.plain(grad)
    formula = _KNOWN.get(type(optimizer))
    if formula is None or local is None:
        return local
    state = {key: _local(value) for key, value in optimizer.state.get(parameter, {}).items()}
    exact = formula(before, local, state, group)
    return local if exact is None else exact


def _local(value: Any) -> Any:
    """Of a sharded tensor this rank's part."""
    return leaves.plain(value) if isinstance(value, Tensor) else value
