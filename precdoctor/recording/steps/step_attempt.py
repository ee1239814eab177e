"""An optimizer-step attempt in progress, and streaks of attempts that the loss scaler skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from precdoctor.recording.model import static


class GradientsAside:
    """Takes the gradients from an optimizer's parameters, so that its step has nothing to do."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._held = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, _ in self._held:
            p.grad = None

    def restore(self) -> None:
        """Give the gradients back to the parameters."""
        for p, grad in self._held:
            p.grad = grad
        self._held = []


class Attempt:
    """One optimizer-step attempt, while it is open."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, *, by_scaler: bool) -> None:
        self.optimizer = optimizer
        self.name = name
        self.by_scaler = by_scaler
        #: Whether it began in a backward pass: then it ends with the pass, and includes every step in it.
        self.in_backward = False
        #: Whether several optimizers make it in turn, or one optimizer once per group: in a backward pass, or inside a
        #: step of DeepSpeed or Megatron.
        self.is_shared = False
        #: Whether the optimizer's state is recorded in this step; None until it is decided.
        self.takes_state: bool | None = None
        #: Whether the optimizer's own step ran.
        self.reached = False
        #: Whether the step was given a closure, which makes the gradients inside the step.
        self.closure = False
        #: How often the closure was called; whether weights changed before one of its calls; the sum of their version
        #: counters at the last call; the micro-step up to which gradients have been judged.
        self.evaluations, self.has_moved, self.weight_versions, self.judged_passes = 0, False, 0, 0
        #: Whether the guard skips this step, and the gradients that it has taken from the parameters.
        self.skipped = False
        self.aside: GradientsAside | None = None
        #: Copies of weights from before the step, by id of the parameter.
        self.before: dict[int, Tensor] = {}
        #: Gradients by reference, by id of the parameter: an optimizer may clear them within its step.
        self.gradients: dict[int, Tensor | None] = {}
        #: Gradients at the beginning of a step with a closure, and their version counters.
        self.given: list[tuple[Tensor, Tensor, int]] = []
        #: Other optimizers that stepped inside this optimizer's step.
        self.driven: list[torch.optim.Optimizer] = []
        #: Number of steps of its base class that are running inside its own.
        self.inner_steps = 0
        #: Whether its closure is the first to call the model: until then weights have no names.
        self.is_unnamed = False


#: Skips in a row, at which the guard checks whether the scale is to blame: halving it did not help.
SUSPICIOUS_SKIPS = 2
#: Skips in a row by a loss scaler, after an attempt was let through, that make an incident.
MAX_SKIPS = 6
#: A scale this small is not the reason if gradients still overflow.
SCALE_FLOOR = 1.0


@dataclass
class Streak:
    """Skips in a row, and whether an attempt was ever let through.

    Kept per optimizer: if optimizers share a scaler, a backoff is one skip of each, but an attempt that it lets through
    says nothing about another optimizer's gradients.
    """

    skips: int = 0
    let_through: bool = False

    def add(self, *, bad: bool) -> None:
        """Count an attempt; ``bad``: its gradients or loss are not finite."""
        self.skips = self.skips + 1 if bad else 0
        self.let_through = self.let_through or not bad

    @property
    def is_suspicious(self) -> bool:
        """Whether the streak has just become long enough to examine."""
        return self.let_through and self.skips == SUSPICIOUS_SKIPS

    def is_stuck(self, scaler: torch.amp.GradScaler) -> bool:
        """Return whether the scaler keeps skipping in vain, or its scale is at the floor; waits for the device."""
        if self.let_through and self.skips >= MAX_SKIPS:
            return True
        scale = static.attribute(scaler, "_scale")
        return scale is not None and float(scale) <= SCALE_FLOOR
