"""What an optimizer holds: its groups, parameters and states, read without calling any code of its class."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static, tensor_leaves

#: What a state is keyed by, in optimizers of torch.
_NAMES = frozenset((str,))
#: What its groups are, there.
_GROUPS = frozenset((dict,))
#: What torch wraps the ``step`` of every class of optimizers in; hooks are called from there.
_WRAPPER: Any = getattr(torch.optim.Optimizer.profile_hook_step(lambda _: None), "__code__", None)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its parameter groups; none where only its own code could give them (a property of a wrapper)."""
    if issubclass(type(optimizer), torch.optim.Optimizer):
        own: Any = dict.get(static.optimizer_dict(optimizer), "param_groups")
        if type(own) is list and _GROUPS.issuperset(map(type, own)):  # most often, and several times a step
            return own
    groups = static.elements(static.attribute(optimizer, "param_groups"))
    return [group for group in groups if issubclass(type(group), dict)]


def parameters_in(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of one group."""
    return static.tensors(dict.get(group, "params"))


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """What it keeps for a parameter, by name: an optimizer of the user's own may keep anything, or nothing, there."""
    plain = issubclass(type(optimizer), torch.optim.Optimizer)
    state: Any = dict.get(static.optimizer_dict(optimizer) if plain else static.own(optimizer), "state")
    own: Any = dict.get(state, parameter) if issubclass(type(state), dict) else None
    if not issubclass(type(own), dict):
        return {}
    if type(own) is dict and _NAMES.issuperset(map(type, own)):
        return own
    return dict(static.items(own))


def steps_made(optimizer: torch.optim.Optimizer) -> Tensor | float | None:
    """How many steps it has made by its own count, as the first state or group with a ``step`` has it; null without."""
    states = (state_of(optimizer, p) for p in parameters_of(optimizer))
    counts = (dict.get(held, "step") for held in itertools.chain(states, groups_of(optimizer)))
    return next((n if type(n) is Tensor else static.number(n) for n in counts if n is not None), None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All of its parameters, group by group."""
    groups = groups_of(optimizer)
    return parameters_in(groups[0]) if len(groups) == 1 else [p for group in groups for p in parameters_in(group)]


def parameters_in_place(groups: list[dict[str, Any]]) -> Sequence[Tensor]:
    """All parameters of groups; where there is one group its very list: to be read at once, in every step."""
    own: Any = dict.get(groups[0], "params") if len(groups) == 1 else None
    if type(own) is list and static.TENSORS.issuperset(map(type, own)):
        return own
    return [p for group in groups for p in parameters_in(group)]


def steps_in_progress(optimizer: torch.optim.Optimizer | None = None) -> int:
    """How many steps run in this thread, one inside the other; one where that cannot be known.

    Args:
        optimizer: whose steps; null for those of any.
    """
    depth, frame = int(_WRAPPER is None), sys._getframe(1).f_back
    while frame is not None and _WRAPPER is not None:
        depth += frame.f_code is _WRAPPER and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame = frame.f_back
    return depth


def gradients_of(optimizer: torch.optim.Optimizer, limit: int) -> list[tuple[Tensor, Tensor, int]]:
    """Parameters, their gradients by reference, and version counters: a closure makes others, and lets go of these.

    Args:
        optimizer: about to step.
        limit: bytes that may be held; there are none if the gradients take more.
    """
    found = [(p, p.grad, p.grad._version) for p in parameters_of(optimizer) if p.grad is not None]
    plain = all(tensor_leaves.plain(grad) is grad and grad.is_cpu for _, grad, _ in found)
    size = sum(grad.nbytes for _, grad, _ in found) if plain else 0
    return found if plain and size <= limit else []
