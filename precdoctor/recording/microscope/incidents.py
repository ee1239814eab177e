"""Numbers the incidents of a process, examines the first few, and logs them.

The guard does not wait for the last gradients of a backward pass: they are judged here, once the step is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from precdoctor.recording.microscope import event_rows, examination
from precdoctor.recording.microscope.live import LiveTrace
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.scene.root_call import RootCall
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.deferred import Deferred, read

#: Maximum number of incidents examined per process: a broken run repeats them.
MAX_EXAMINED: Final = 4
#: The reason why an incident of the last gradients was not examined, as logged.
TOO_LATE: Final = (
    "it is one of the last to arrive, and those are judged when the step is over; 'precdoctor autopsy' finds its op"
)


class Incidents:
    """The incidents of this process so far.

    Attributes:
        examined: number of incidents that were examined.
    """

    def __init__(self, context: StepContext, scene: Scene) -> None:
        self._context, self._scene = context, scene
        self._forget()
        context.when_forked.append(self._forget)

    def _forget(self) -> None:
        self.examined = 0
        self._count = 0

    @property
    def has_room(self) -> bool:
        """Whether one more incident will be examined."""
        return self.examined < MAX_EXAMINED

    def number(self) -> str:
        """Return the number of a new incident, unique in the run."""
        number = f"{attach.global_rank()}-i{self._count}"
        self._count += 1
        return number

    def log(self, done: examination.Examination, data: dict[str, Any]) -> None:
        """Log an incident that was examined, with its ops."""
        number = self.number()
        self._context.event("incident", **event_rows.incident_event(done, number, data))
        for row in event_rows.op_events(done, number):
            self._context.event("op", **row)

    def log_step(self, rows: list[dict[str, Any]], data: dict[str, Any]) -> None:
        """Log an incident that an optimizer's step has made; ``rows``: the whole step as an op, per bad tensor."""
        number = self.number()
        origin = {"outcome": "origin", "phase": "optimizer", "origins": list(range(len(rows)))}
        self._context.event("incident", id=number, data={**data, **origin})
        for row in rows:
            self._context.event("op", **row, id=f"{number}.{row['data']['index']}", parent_id=number)

    def examine(
        self,
        look_at: str,
        what: str,
        data: dict[str, Any],
        end: str,
        *,
        calls: list[RootCall] | None = None,
        alone: bool = False,
        is_certain: bool = True,
    ) -> bool:
        """Log an incident of the current step; replay the step to find the op if few incidents were examined so far.

        Returns whether there was an incident.

        Args:
            look_at: where the bad value is, as for :func:`.examination.examine`.
            what: the tensor that is not finite, for the terminal.
            data: what is known of the incident already.
            end: what happens next, as the end of a sentence for the terminal.
            calls, alone: as for :func:`.examination.examine`.
            is_certain: false: there is an incident only if the replay finds an op.
        """
        context = self._context
        if not self.has_room:
            if is_certain:
                context.event("incident", id=self.number(), data={**data, "outcome": "not-examined"})
            return is_certain
        self.examined += 1
        values = not context.options.redact_names
        if (why := context.threads.why_no_replay) is not None:
            done = examination.Examination("refused", why=why)
        else:
            done = examination.examine(self._scene, context.names, look_at, values=values, calls=calls, alone=alone)
        if not is_certain and done.outcome != "origin":
            return False
        self.log(done, data | self._scene.deliveries.facts())
        if done.outcome != "origin" and context.options.arm_next and context.trace is None:
            first = context.step + 1
            context.trace = LiveTrace(context, (first, first + context.options.arm_next), lambda: None)
        when = f"after step {context.step - 1}" if data.get("evaluation") else f"step {context.step}"
        attach.say(f"{when}: {what} is not finite{event_rows.origin(done)}{end}")
        return True


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
