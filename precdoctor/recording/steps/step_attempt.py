"""An optimizer-step attempt in progress, and streaks of attempts that changed no weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from precdoctor.recording.model import static


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
        #: It began in a backward pass, whose end is its end: what steps until then is part of it.
        self.in_backward = False
        #: Several optimizers make it one after the other, or one does once per group: in a backward pass, or for a
        #: library that tells of its end.
        self.is_shared = False
        #: The states of its parameters are recorded in this step.
        self.takes_state: bool | None = None
        #: The optimizer's own step ran.
        self.reached = False
        #: It was given a closure: the gradients of this step come into being inside the step.
        self.closure = False
        #: How often that was called, whether weights were written to before one of the calls, and by version counters
        #: what they were; how many backward passes of the step have been judged.
        self.evaluations, self.moved, self.weights, self.judged = 0, False, 0, 0
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
        #: Steps of its base class, in progress inside its own.
        self.inner = 0
        #: It is the first to call the model, from its closure: until then its weights have no names.
        self.is_unnamed = False


#: In a row: half the scale did not help, so that it is worth a look whether the scale is to blame at all.
SUSPICIOUS_SKIPS = 2
#: Steps a loss scaler may skip in a row, after it has let one through, before that is an incident.
MAX_SKIPS = 6
#: A scale that has come down to this and still overflows does not suffer from the scale.
SCALE_FLOOR = 1.0


@dataclass
class Streak:
    """Skips in a row, and whether an attempt was ever let through.

    Each optimizer has its own: where several share a scaler, a backoff of it is one skip of each, and what the scaler
    lets through of one says nothing of another's gradients.
    """

    skips: int = 0
    let_through: bool = False

    def add(self, *, bad: bool) -> None:
        """One more attempt, with gradients or a loss that are not finite or without."""
        self.skips = self.skips + 1 if bad else 0
        self.let_through = self.let_through or not bad

    @property
    def is_suspicious(self) -> bool:
        """Whether it has just become worth a look."""
        return self.let_through and self.skips == SUSPICIOUS_SKIPS

    def is_stuck(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether the scaler goes on skipping to no avail. Reads the scale, which waits for the device."""
        if self.let_through and self.skips >= MAX_SKIPS:
            return True
        scale = static.attribute(scaler, "_scale")
        return scale is not None and float(scale) <= SCALE_FLOOR
