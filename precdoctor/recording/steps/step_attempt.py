"""An optimizer-step attempt in progress, and streaks of attempts that the loss scaler skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class Attempt:
    """One optimizer-step attempt, while it is open."""

    optimizer: torch.optim.Optimizer
    name: str
    by_scaler: bool
    #: Whether it began in a backward pass: then it ends with the pass, and includes every step in it.
    in_backward: bool = False
    #: Whether several optimizers make it in turn, or one optimizer once per group: in a backward pass, or inside a
    #: step of DeepSpeed or Megatron.
    is_shared: bool = False
    #: Whether the optimizer's state is recorded in this step; None until it is decided.
    takes_state: bool | None = None
    #: Whether the optimizer's own step ran.
    reached: bool = False
    #: Whether the step was given a closure, which makes the gradients inside the step.
    closure: bool = False
    #: How often the closure was called; whether weights changed before one of its calls; the sum of their version
    #: counters at the last call; the micro-step up to which gradients have been judged.
    evaluations: int = 0
    has_moved: bool = False
    weight_versions: int = 0
    judged_passes: int = 0
    #: Whether the guard skips this step, and the gradients that it has taken from the parameters.
    skipped: bool = False
    aside: GradientsAside | None = None
    #: Copies of weights from before the step, by id of the parameter.
    before: dict[int, Tensor] = field(default_factory=dict)
    #: Gradients by reference, by id of the parameter: an optimizer may clear them within its step.
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    #: Gradients at the beginning of a step with a closure, and their version counters.
    given: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    #: Other optimizers that stepped inside this optimizer's step.
    driven: list[torch.optim.Optimizer] = field(default_factory=list)
    #: Number of steps of its base class that are running inside its own.
    inner_steps: int = 0
    #: Whether its closure is the first to call the model: until then weights have no names.
    is_unnamed: bool = False


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
