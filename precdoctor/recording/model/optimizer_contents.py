"""Groups, parameters and states of an optimizer, read without calling code of its class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static, tensor_leaves

#: Types of the keys of a state, in torch's optimizers.
_NAMES = frozenset((str,))
#: Types of the parameter groups, in torch's optimizers.
_GROUPS = frozenset((dict,))
#: Code of the function that torch wraps around every ``step``; hooks are called from there.
_WRAPPER: Any = getattr(torch.optim.Optimizer.profile_hook_step(lambda _: None), "__code__", None)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups; none if only its own code could return them (a wrapper's property)."""
    if issubclass(type(optimizer), torch.optim.Optimizer):
        own: Any = dict.get(static.optimizer_dict(optimizer), "param_groups")
        if type(own) is list and _GROUPS.issuperset(map(type, own)):  # the usual case, several times a step
            return own
    groups = static.elements(static.attribute(optimizer, "param_groups"))
    return [group for group in groups if issubclass(type(group), dict)]


def parameters_in(group: dict[str, Any]) -> list[Tensor]:
    """Return a group's parameters."""
    return static.tensors(dict.get(group, "params"))


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter, by name; empty if a user's optimizer stores something else there."""
    plain = issubclass(type(optimizer), torch.optim.Optimizer)
    state: Any = dict.get(static.optimizer_dict(optimizer) if plain else static.own(optimizer), "state")
    own: Any = dict.get(state, parameter) if issubclass(type(state), dict) else None
    if not issubclass(type(own), dict):
        return {}
    if type(own) is dict and _NAMES.issuperset(map(type, own)):
        return own
    return dict(static.items(own))


def steps_made(optimizer: torch.optim.Optimizer) -> Tensor | float | None:
    """Return the optimizer's own step count, from the first state or group with a ``step``; None if there is none.

    A group's count starts at its default, which is 1 in some optimizers; without a default, at most 1 beside empty
    states is none.
    """
    states = [state_of(optimizer, p) for p in parameters_of(optimizer)]
    count = _first_count(states)
    if count is not None:
        return count
    count = _first_count(groups_of(optimizer))
    if not isinstance(count, float):
        return count
    defaults = static.attribute(optimizer, "defaults")
    start = static.number(dict.get(defaults, "step")) if issubclass(type(defaults), dict) else None
    return None if count <= 1.0 and not any(states) else count - (start or 0.0)


def _first_count(holders: Iterable[dict[str, Any]]) -> Tensor | float | None:
    counts = (dict.get(held, "step") for held in holders)
    return next((n if type(n) is Tensor else static.number(n) for n in counts if n is not None), None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, group by group."""
    groups = groups_of(optimizer)
    return parameters_in(groups[0]) if len(groups) == 1 else [p for group in groups for p in parameters_in(group)]


def parameters_in_place(groups: list[dict[str, Any]]) -> Sequence[Tensor]:
    """Return all parameters of some groups. May be the optimizer's own list: read it at once. Runs every step."""
    own: Any = dict.get(groups[0], "params") if len(groups) == 1 else None
    if type(own) is list and static.TENSORS.issuperset(map(type, own)):
        return own
    return [p for group in groups for p in parameters_in(group)]


def steps_in_progress(optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return how many ``step`` calls are running in this thread, nested; 1 if that is unknown.

    Args:
        optimizer: count only its steps; None: those of any.
    """
    depth, frame = int(_WRAPPER is None), sys._getframe(1).f_back
    while frame is not None and _WRAPPER is not None:
        depth += frame.f_code is _WRAPPER and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame = frame.f_back
    return depth


def gradients_of(optimizer: torch.optim.Optimizer, limit: int) -> list[tuple[Tensor, Tensor, int]]:
    """Return parameters, gradients by reference, and version counters, before a closure replaces the gradients.

    Args:
        optimizer: about to step.
        limit: bytes that may be held. The list is empty if the gradients take more, or are not plain CPU tensors with
            version counters.
    """
    given = [p for p in parameters_of(optimizer) if p.grad is not None]
    plain = [(p, grad, grad._version) for p in given if (grad := tensor_leaves.plain_gradient(p)) is not None]
    fits = len(plain) == len(given) and all(grad.is_cpu for _, grad, _ in plain)
    return plain if fits and sum(grad.nbytes for _, grad, _ in plain) <= limit else []
