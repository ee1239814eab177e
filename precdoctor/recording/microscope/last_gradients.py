"""The last gradients of a backward pass, where the guard does not wait for them: judged when the step is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.deferred import Deferred, read

#: Why their incident was not examined.
TOO_LATE: Final = (
    "it is one of the last to arrive, and those are judged when the step is over; 'precdoctor autopsy' finds its op"
)


class LastGradients:
    """Keeps them for a step.

    Args:
        context: logs what is found.
        tell: gives an incident its number, and says that a step is bad.
    """

    def __init__(self, context: StepContext, tell: Callable[[int], str]) -> None:
        self._context, self._tell = context, tell
        #: A step, and the largest magnitude of what was not looked at in it.
        self.left: tuple[int, Deferred] | None = None
        context.when_closing.append(self._judge_at_end)

    def forget(self) -> None:
        """In a forked child."""
        self.left = None

    def leave(self, step: int, amax: Deferred) -> None:
        """The step goes on without a look at this number."""
        self.left = step, amax

    def take(self, step: int) -> Callable[[], None] | None:
        """What judges those of steps before this one; to be called when the device is past them."""
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
        self._context.event("incident", step=step, id=self._tell(step), data=data)
        attach.say(f"step {step}: a gradient is not finite ({TOO_LATE}); training goes on")

    def _judge_at_end(self) -> None:
        try:
            if (judge := self.take(self._context.step + 1)) is not None:
                judge()
        except RuntimeError as error:  # of the device: nothing can be read from it any more
            attach.let_through(error)
