"""From op facts to an incident: where it began, at which op and line, and why."""

from __future__ import annotations

from dataclasses import dataclass

from precdoctor.diagnosis.claims.finding import Phase, Source
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import op_cause
from precdoctor.diagnosis.families.nonfinite.culprit_op import Blame, blame
from precdoctor.diagnosis.families.nonfinite.tensor_causes import Cause
from precdoctor.diagnosis.survey.op_facts import Examined, Op, examined_at
from precdoctor.diagnosis.survey.view import Process, RunView


@dataclass(frozen=True)
class Culprit:
    """The op an examined incident is put down to, and everything known of it."""

    examined: Examined
    blamed: Blame
    phase: Phase
    cause: Cause

    @property
    def op(self) -> Op:
        """The op itself; for a tensor that was bad before the step, the first op that read it."""
        return self.blamed.op

    @property
    def module(self) -> str | None:
        """FQN of the module whose code runs the op."""
        return self.op.module

    @property
    def source(self) -> Source | None:
        """The user's line; for a backward op the forward line that made its node."""
        return self.op.source

    @property
    def between_roots(self) -> bool:
        """Whether the bad value came into the examined code from other code, which made it of a module's output."""
        return self.blamed.external is not None and self.blamed.external[0] == "argument"

    @property
    def certainty(self) -> float:
        """Confidence: what is certain at the op, less where the replay was not the run bit for bit."""
        confidence = self.cause.confidence
        if self.examined.phase == "optimizer":
            return confidence
        return round(confidence if self.examined.reproduced == "bit-for-bit" else confidence - 0.1, 2)


def culprit_at(view: RunView, process: Process, step: int) -> Culprit | None:
    """What the microscope found at a step; None when it did not look, or came to no op."""
    examined = examined_at(view, process, step)
    blamed = blame(examined) if examined is not None and examined.outcome == "origin" else None
    if examined is None or blamed is None:
        return None
    cause = op_cause(examined, blamed, scale_of_gradients(view, process, step))
    return Culprit(examined, blamed, _phase(view, examined, blamed), cause)


def scale_of_gradients(view: RunView, process: Process, step: int) -> float | None:
    """The loss scale in a step's gradients; they are those of the step before when there was no backward pass."""
    facts = view.step_facts(process, step)
    while facts is not None and facts.loss_scale is None and not facts.micro_steps:
        facts = view.step_facts(process, facts.step - 1)
    return facts.loss_scale if facts is not None else None


def _phase(view: RunView, examined: Examined, blamed: Blame) -> Phase:
    from precdoctor.diagnosis.survey.origin import class_of, is_loss_module

    if examined.phase == "optimizer":
        return Phase.OPTIMIZER
    if blamed.of_target:
        return Phase.DATA
    if blamed.external is not None:
        loss = not examined.root or is_loss_module(examined.root, "", "")
        return {"batch": Phase.DATA, "data": Phase.DATA, "weight": Phase.OPTIMIZER, "buffer": Phase.OPTIMIZER}.get(
            blamed.external[0], Phase.LOSS if loss else Phase.FORWARD
        )
    if examined.phase == "backward" and blamed.mask is None:
        return Phase.BACKWARD  # a mask's victim is a forward op, whose result the loss did not use
    if not examined.root:
        return Phase.LOSS
    module_class = class_of(view.module_classes, examined.root, blamed.op.module or "")
    loss = is_loss_module(examined.root, "", "") or is_loss_module(examined.root, blamed.op.module or "", module_class)
    return Phase.LOSS if loss else Phase.FORWARD
