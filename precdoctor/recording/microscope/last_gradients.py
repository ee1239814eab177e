"""The last gradients of a backward pass if the guard does not wait for them: judged once the step is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import Deferred, read

#: The reason why such an incident was not examined, as logged.
TOO_LATE: Final = (
    "it is one of the last to arrive, and those are judged when the step is over; 'precdoctor autopsy' finds its op"
)


class LastGradients:
    """Holds the amax of a step's last gradients until the next step.

    Args:
        tell: marks a step as bad and returns the incident's number.
    """

    def __init__(self, context: StepContext, tell: Callable[[int], str]) -> None:
        self._context, self._mark_bad = context, tell
        #: A step, and the amax of the gradients in it that were not judged.
        self.left: tuple[int, Deferred] | None = None
        context.when_closing.append(self._judge_at_end)

    def take(self, step: int) -> Callable[[], None] | None:
        """Return a function that judges an earlier step's amax, to call once the device is past it; else None."""
        if self.left is None or self.left[0] == step:
            return None
        left, self.left = self.left, None
        return lambda: self._judge(*left)

    def _judge(self, step: int, amax: Deferred) -> None:
        if math.isfinite(read(amax) or 0.0):
            return
        policy = self._context.options.on_nonfinite
        data: dict[str, Any] = {"policy": policy, "loss_is_bad": False, "gradients_are_bad": True, "skips_in_a_row": 0}
        data |= {"outcome": "refused", "why": TOO_LATE}
        self._context.event("incident", step=step, id=self._mark_bad(step), data=data)
        attach.say(f"step {step}: a gradient is not finite ({TOO_LATE}); training goes on")

    def _judge_at_end(self) -> None:
        """Judge the amax that is left when the process closes its log."""
        try:
            if (judge := self.take(self._context.step + 1)) is not None:
                judge()
        except RuntimeError as error:  # the device has failed: nothing can be read from it any more
            attach.let_through(error)
