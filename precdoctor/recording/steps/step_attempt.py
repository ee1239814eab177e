"""An optimizer-step attempt in progress."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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
        #: A library announces it, and steps this optimizer once per group, or several one after the other.
        self.by_library = False
        #: The states of its parameters are recorded in this step.
        self.takes_state: bool | None = None
        #: The optimizer's own step ran.
        self.reached = False
        #: It was given a closure: the gradients of this step come into being inside the step.
        self.closure = False
        #: The guard wants this step skipped: its gradients, while they are taken from the parameters.
        self.skipped = False
        self.aside: GradientsAside | None = None
        #: Copies of weights from before the step, by id of the parameter.
        self.before: dict[int, Tensor] = {}
        #: Their gradients, by reference: an optimizer may clear them within its step.
        self.gradients: dict[int, Tensor | None] = {}
        #: The gradients that a step with a closure began with, and their version counters.
        self.given: list[tuple[Tensor, Tensor, int]] = []
        #: Optimizers that this one drives, and that stepped.
        self.driven: list[torch.optim.Optimizer] = []
