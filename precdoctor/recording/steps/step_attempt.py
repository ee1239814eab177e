"""An optimizer-step attempt in progress, and what there is to an optimizer at its beginning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static, tensor_leaves

#: What a state is keyed by, in optimizers of torch.
_NAMES = frozenset((str,))
#: What its groups are, there.
_GROUPS = frozenset((dict,))


class GradientsAside:
    """Takes the gradients from the parameters of an optimizer, so that its step finds nothing to do."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._held = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, _ in self._held:
            p.grad = None

    def restore(self) -> None:
        """Gives them back."""
        for p, grad in self._held:
            p.grad = grad
        self._held = []


class Attempt:
    """One of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, *, by_scaler: bool) -> None:
        self.optimizer = optimizer
        self.name = name
        self.by_scaler = by_scaler
        #: The optimizer's own step ran.
        self.reached = False
        #: It was given a closure: the gradients of this step come into being inside the step.
        self.closure = False
        #: The guard wants this step skipped: its gradients, while they are taken from the parameters.
        self.skipped = False
        self.aside: GradientsAside | None = None
        #: Copies of weights from before the step, by id of the parameter.
        self.before: dict[int, Tensor] = {}
        #: The gradients that a step with a closure began with, and their version counters.
        self.given: list[tuple[Tensor, Tensor, int]] = []
        #: Optimizers that this one drives, and that stepped.
        self.driven: list[torch.optim.Optimizer] = []


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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All of its parameters, group by group."""
    groups = groups_of(optimizer)
    return parameters_in(groups[0]) if len(groups) == 1 else [p for group in groups for p in parameters_in(group)]


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
