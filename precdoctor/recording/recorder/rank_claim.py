"""When a process is a rank. One that trains is; a helper that only runs a model forward is not, however early it does.

A rank begins with its first optimizer-step attempt, a step made by hand, or an incident. Until then what is recorded
waits in memory: the statistics in their slots, the events in a list. A process that ends without a step claims a
directory only where there is something to explain: a backward pass ran, or a forward pass in training died or made
something non-finite. All others leave lines in ``attach.jsonl``. With ``--inference`` the first forward pass is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from precdoctor import _attach_file
from precdoctor.recording import kernels
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.process import attach, memory_shortage
from precdoctor.recording.process.deferral import HeldSignals
from precdoctor.recording.process.fatal_exception import ends_badly
from precdoctor.recording.slots.step_batch import EventBatch

if TYPE_CHECKING:
    from precdoctor.recording.model.module_names import Root
    from precdoctor.recording.recorder import Recorder

#: Calls of models that are measured before the first sign of training: a process that serves a model pays no longer.
MAX_CALLS_BEFORE = 64
#: Events that may wait; a step has dozens.
_MAX_WAITING = 4096


class Claim:
    """Of one process; see the module's text.

    Attributes:
        forwards_are_steps: there is no other step to wait for (``--inference``, until a backward pass begins).
        measures_groups: such a step is sampled, and its tensors are measured by token, channel, head and 128 features.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.forwards_are_steps = recorder.options.inference
        self.measures_groups = False
        self._recorder = recorder
        self._waiting: list[dict[str, Any]] = []
        self._backward = False
        self._calls = 0

    @property
    def made(self) -> bool:
        """Whether this process is a rank and has a directory."""
        return self._recorder.drain is not None

    @property
    def patient(self) -> bool:
        """Whether a forward pass is still worth a closer look: training is not out of the question."""
        return self.made or self._backward or self._calls <= MAX_CALLS_BEFORE

    def keep(self, event: dict[str, Any]) -> None:
        """Have an events row wait for the directory."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(event)

    def forward_begins(self, *, gradients: bool) -> None:
        """A top-level module is called.

        Args:
            gradients: autograd records it; without them a process that never trained is measured for some calls only.
        """
        if self.made or self._backward:
            return
        self._calls += 1
        self._recorder.live = self._recorder.current.sampled and (gradients or self.patient)

    def model_begins(self, root: Root) -> None:
        """Of an inference run, a top-level module is called: with parameters of its own it begins another step."""
        if not root.parametric:
            return
        recorder = self._recorder
        if recorder.current.root:
            recorder.end_step()
        else:
            self.make()
        recorder.current.root = root.name

    def model_ended(self) -> None:
        """... and has returned: the step is complete, unless modules without parameters are called."""
        recorder = self._recorder
        recorder.current.complete = bool(recorder.current.root)
        if recorder.trace is not None:
            recorder.trace.end(answered=True)

    def wants_blocks(self, step: int) -> bool:
        """Whether the coming step, which is sampled, also gets block histograms."""
        wanted = self._recorder.sampler.wants_blocks(step)
        self.measures_groups = wanted and self.forwards_are_steps
        return wanted

    def backward_begins(self) -> None:
        """A backward pass begins: a step is to be expected, and from now on it is the optimizer's."""
        recorder = self._recorder
        if self.forwards_are_steps:
            self.forwards_are_steps = self.measures_groups = recorder.current.complete = False
            recorder.current.root = ""
        if self.made or self._backward:
            return
        self._backward = True
        recorder.live = recorder.current.sampled
        _attach_file.note(str(recorder.run), "backward")

    @property
    def has_trained(self) -> bool:
        """Whether a step of a training has begun; in an inference run none does."""
        recorder = self._recorder
        in_step = recorder.micro_step or recorder.in_backward or recorder.current.optimizer
        begun = in_step or recorder.step != recorder.options.first_step
        return bool(begun) and not self.forwards_are_steps

    def make(self, *, ending: bool = False) -> bool:
        """Make the directory of this process and hand over what has waited; a second call does nothing.

        Args:
            ending: the process ends; its interpreter may refuse to start another thread.

        Returns:
            Whether the process is recorded.
        """
        recorder = self._recorder
        if self.made or recorder.state != "armed":
            return recorder.state == "armed"
        rank = attach.global_rank()  # the process group may have been made since the first forward pass
        if not chosen(recorder, rank) or not has_room(recorder):
            recorder.state, recorder.live = "off", False
            return False
        with recorder.off_the_clock():
            try:
                with HeldSignals():
                    self._begin(ending=ending)
            except Exception as error:  # noqa: BLE001 - the user's step must succeed whatever happens here
                cannot_begin(recorder, error)
                return False
        return True

    def _begin(self, *, ending: bool) -> None:
        with memory_shortage.small_arrow():  # it is for ranks alone: helpers come in hundreds
            from precdoctor.recording.output.drain import Drain

        recorder = self._recorder
        rank = attach.global_rank()
        recorder.drain = Drain(recorder.run, rank, recorder.options, threaded=not ending)
        recorder.live = recorder.live or (recorder.current.sampled and not ending)
        _attach_file.note(str(recorder.run), "armed")
        waiting, self._waiting = self._waiting, []
        if waiting:
            recorder.drain.put(EventBatch(waiting))

    def at_end(self, *, stopped: bool) -> None:
        """The process ends: claim a directory if something is to be explained that no step has shown.

        Args:
            stopped: by the recorder, which was asked to.
        """
        if self.forwards_are_steps and self._recorder.current.complete:
            self._recorder.end_step()  # the last call has returned
        if self.made:
            return
        if stopped or self._backward or (self._forward_trained() and (ends_badly() or self._is_sick())):
            self.make(ending=True)

    def step_has_begun(self, *, stopped: bool) -> bool:
        """Whether the run ends inside a step: evaluation after the last step does not begin another one.

        Some evaluate in training mode, with gradients. Such forward passes are of a step only if an exception or a NaN
        may have kept their backward pass from beginning.

        Args:
            stopped: by the recorder, which was asked to.
        """
        recorder = self._recorder
        facts, first = recorder.current, recorder.step == recorder.options.first_step
        trained = facts.losses or recorder.micro_step
        if not (trained or first or stopped or self.forwards_are_steps or ends_badly() or self._is_sick()):
            return False
        rows = (e for e in recorder.slots.touched.values() if first or e.site.phase == "train")  # first: never trains
        # Weights are also exported to float8 after training: a cast alone begins no step.
        return bool(trained or facts.root) or any(
            e.counts_as_training(recorder.names) for e in rows if e.operand is None
        )

    def _forward_trained(self) -> bool:
        """Whether a forward pass ran as training runs it: in training mode, with gradients."""
        return any(e.site.phase == "train" and not e.site.evaluating for e in self._recorder.slots.touched.values())

    def _is_sick(self) -> bool:
        """Whether such a forward pass made or met a NaN or +Inf; -Inf alone is a mask. Waits for the device."""
        touched = self._recorder.slots.touched.values()
        entries = [e for e in touched if e.site.phase == "train" and not e.site.evaluating]
        for entry in entries:
            ints, _ = kernels.bank(entry.device).row(entry.slot)
            if np.any(ints.cpu().numpy()[[at.NAN, at.POS_INF]]):
                return True
        return False


def chosen(recorder: Recorder, rank: int) -> bool:
    """Whether ``--ranks`` names this process."""
    named = recorder.options.ranks is None or rank in recorder.options.ranks
    if not named:
        _attach_file.note(str(recorder.run), "left out")
    return named


def has_room(recorder: Recorder) -> bool:
    """Whether limits on this process leave room for recording it; says so where they do not."""
    why = memory_shortage.shortage()
    if why is not None:
        _attach_file.note(str(recorder.run), "error", why)
        attach.say(f"{why}; training goes on unrecorded")
    return why is None


def cannot_begin(recorder: Recorder, error: Exception) -> None:
    """This process will not be recorded; its training goes on.

    Raises:
        Exception: ``error``, with ``--strict``, or when a signal handler of the user's raised it.
    """
    attach.let_through(error)
    recorder.state, recorder.live = "off", False
    if isinstance(error, OSError):
        message = f"the run directory cannot be written ({error.strerror or error})"
    else:
        message = f"the recorder cannot start ({type(error).__name__}: {error})"
    _attach_file.note(str(recorder.run), "error", message)
    if recorder.options.strict:
        raise error
    attach.say(f"{message}; training goes on unrecorded")
