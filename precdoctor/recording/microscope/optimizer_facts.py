"""Raw facts of parameters an optimizer step made non-finite: gradient, state, settings, and the first bad element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in, state_of
from precdoctor.recording.ops.tensor_facts import badness, describe, value_at
from precdoctor.recording.steps.persistent_state import Poisoned

#: Parameters reported per incident.
_MAX_PARAMETERS = 4
_SETTINGS = ("lr", "eps", "betas", "momentum", "weight_decay", "alpha", "rho", "lr_decay", "maximize", "amsgrad")

#: Settings that an infinity also spoils: others, such as a limit of the group's, may be infinite on purpose.
_FACTORS = frozenset(
    ("lr", "betas", "beta1", "beta2", "momentum", "dampening", "weight_decay", "alpha", "rho", "lr_decay", "etas")
)

#: A parameter's root, module and name.
Named = Callable[[Tensor], tuple[str, str, str]]


def bad_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    """The optimizer's parameters that hold a NaN or an infinity, with their group."""
    found = []
    for group in groups_of(optimizer):
        for parameter in parameters_in(group):
            dense = tensor_leaves.plain(parameter)
            if dense is not None and badness(dense.detach()):
                found.append((parameter, group))
    return found


def bad_settings(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Settings of the groups these parameters are in that are NaN, or infinite where that spoils every update.

    Returns:
        Number of the ``group``, ``name`` (``betas[1]``) and ``value`` of each.
    """
    wanted = {id(p) for p in parameters}
    found = []
    for number, group in enumerate(groups_of(optimizer)):
        if not any(id(p) in wanted for p in parameters_in(group)):
            continue
        for key, value in static.items(group):
            if key == "params":
                continue
            parts = [(f"[{i}]", v) for i, v in enumerate(value)] if type(value) is tuple else [("", value)]
            for index, part in parts:
                setting = _number(part)
                if math.isnan(setting) or (math.isinf(setting) and key in _FACTORS):
                    found.append({"group": number, "name": f"{key}{index}", "value": setting})
    return found


def _number(value: Any) -> float:
    """A setting as a number; 0 for what is none."""
    if (known := static.number(value)) is not None:
        return known
    dense = tensor_leaves.plain(value) if issubclass(type(value), Tensor) and value.numel() == 1 else None
    return float(dense.detach()) if dense is not None and dense.is_floating_point() else 0.0


def parameter_events(
    optimizer: torch.optim.Optimizer,
    bad: list[tuple[Tensor, dict[str, Any]]],
    before: Mapping[int, Tensor],
    named: Named,
    *,
    values: bool,
) -> list[dict[str, Any]]:
    """An ``op`` row per bad parameter; ``argument`` is weight, grad or the name of a state tensor.

    Args:
        before: copies of the weights from before the step, by ``id``, as far as there are any.
        values: take single values at the first bad element.
    """
    rows = []
    for index, (parameter, group) in enumerate(bad[:_MAX_PARAMETERS]):
        state = {k: v for k, v in state_of(optimizer, parameter).items() if issubclass(type(v), Tensor)}
        tensors = {"weight": before.get(id(parameter)), "grad": parameter.grad, **state}
        rows.append(_event(optimizer, index, parameter, group, parameter, tensors, named, values=values))
    return rows


def state_events(
    optimizer: torch.optim.Optimizer, poisoned: Sequence[Poisoned], named: Named, *, values: bool
) -> list[dict[str, Any]]:
    """An ``op`` row per state tensor that a step made non-finite; its ``state`` is the tensor's name.

    Args:
        poisoned: state tensors, right after the step.
        values: take single values at the first bad element.
    """
    groups = {id(p): group for group in groups_of(optimizer) for p in parameters_in(group)}
    rows = []
    for index, found in enumerate(poisoned[:_MAX_PARAMETERS]):
        parameter = found.parameter
        if parameter is None:
            continue
        group = groups.get(id(parameter), {})
        tensors = {"weight": parameter, "grad": parameter.grad, found.name: found.tensor}
        rows.append(
            _event(optimizer, index, parameter, group, found.tensor, tensors, named, values=values, state=found.name)
        )
    return rows


def _event(
    optimizer: torch.optim.Optimizer,
    index: int,
    parameter: Tensor,
    group: dict[str, Any],
    bad: Tensor,
    tensors: Mapping[str, Tensor | None],
    named: Named,
    *,
    values: bool,
    **more: str,
) -> dict[str, Any]:
    """The row of ``bad``, which is a parameter or some state of it; ``tensors`` are the operands of the step."""
    root, module, name = named(parameter)
    after = describe(bad.detach())
    operands = []
    for argument, x in tensors.items():
        plain = tensor_leaves.plain(x) if x is not None else None
        if plain is None:
            continue
        operands.append({"argument": argument, **describe(plain.detach())})
        if values and "first_bad" in after:
            operands[-1]["value"] = value_at(plain.detach(), after["first_bad"], bad.shape)
    data = {
        "index": index,
        "phase": "optimizer",
        "suspect": True,
        "bad_out": badness(bad.detach()),
        "bad_in": [0 for _ in operands],
        "parameter": name,
        **more,
        "operands": operands,
        "results": [after],
        "settings": {k: _plain(group[k]) for k in _SETTINGS if k in group},
    }
    return {"root": root, "module": module, "op": f"optim.{type(optimizer).__name__}.step", "data": data}


def _plain(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        return float(value) if value.numel() == 1 else None
    return static.plain(value)
