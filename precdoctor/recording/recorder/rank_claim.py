"""Decides when a process becomes a rank with a directory: when it trains, not when it only runs a model forward.

A process becomes a rank at its first optimizer-step attempt, a step made by hand, or an incident. Until then its
statistics wait in their slots and its events in a list. A process that ends before its first step claims a directory
only if there is something to explain: a backward pass ran, or a forward pass in training raised or made a NaN or +Inf.
Every other process leaves only lines in ``attach.jsonl``. With ``--inference`` the first forward pass is enough.
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
    from precdoctor.recording.slots.slot_table import Entry

#: Calls without gradients are measured up to this many model calls: then a process that only serves a model is left
#: alone.
MAX_CALLS_BEFORE = 64
#: Most events that wait for the directory; one step has dozens.
_MAX_WAITING = 4096


class Claim:
    """Whether this process is a rank; see the module docstring.

    Attributes:
        forwards_are_steps: each call of a top-level model is a step (``--inference``, until a backward pass begins).
        measures_groups: the current step is a model call with block histograms: its tensors are also measured per
            token, channel, head and group of 128 features.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.forwards_are_steps = recorder.options.inference
        self.measures_groups = False
        self._recorder = recorder
        self._waiting_events: list[dict[str, Any]] = []
        self._has_backward = False
        self._calls = 0

    @property
    def is_rank(self) -> bool:
        return self._recorder.drain is not None

    @property
    def may_train(self) -> bool:
        """Whether calls without gradients are still measured: the process trains, or has made few calls so far."""
        return self.is_rank or self._has_backward or self._calls <= MAX_CALLS_BEFORE

    def hold_event(self, event: dict[str, Any]) -> None:
        """Store an events row until there is a directory; drop it if too many wait."""
        if len(self._waiting_events) < _MAX_WAITING:
            self._waiting_events.append(event)

    def forward_begins(self, *, gradients: bool) -> None:
        """Note that a top-level module is called; ``gradients``: whether autograd records the call."""
        if self.is_rank or self._has_backward:
            return
        self._calls += 1
        self._recorder.live = self._recorder.current.sampled and (gradients or self.may_train)

    def model_begins(self, root: Root) -> None:
        """In an inference run, begin a step as a top-level module is called, if it has any parameters."""
        if not root.parametric:
            return
        recorder = self._recorder
        if recorder.current.root:
            recorder.end_step()
        else:
            self.make()
        recorder.current.root = root.name

    def model_ended(self) -> None:
        """In an inference run, mark the step complete as the call returns; modules without parameters make no step."""
        recorder = self._recorder
        recorder.current.complete = bool(recorder.current.root)
        if recorder.trace is not None:
            recorder.trace.end(answered=True)

    def wants_blocks(self, step: int) -> bool:
        """Return whether the coming step, which is sampled, also gets block histograms."""
        wanted = self._recorder.sampler.wants_blocks(step)
        self.measures_groups = wanted and self.forwards_are_steps
        return wanted

    def backward_begins(self) -> None:
        """Note that a backward pass begins: from now on steps are the optimizer's, no longer model calls."""
        recorder = self._recorder
        if self.forwards_are_steps:
            self.forwards_are_steps = self.measures_groups = recorder.current.complete = False
            recorder.current.root = ""
        if self.is_rank or self._has_backward:
            return
        self._has_backward = True
        recorder.live = recorder.current.sampled
        _attach_file.note(str(recorder.run), "backward")

    @property
    def has_trained(self) -> bool:
        """Whether the first training step has begun; False while model calls are the steps."""
        recorder = self._recorder
        in_step = recorder.micro_step or recorder.in_backward or recorder.current.optimizer
        begun = in_step or recorder.step != recorder.options.first_step
        return bool(begun) and not self.forwards_are_steps

    def make(self, *, ending: bool = False) -> bool:
        """Make the directory of this process and write the waiting events; do nothing if it exists.

        Args:
            ending: the process is ending; its interpreter may refuse to start a thread.

        Returns:
            Whether the process is recorded.
        """
        recorder = self._recorder
        if self.is_rank or recorder.state != "armed":
            return recorder.state == "armed"
        if not may_record(recorder):  # again: the process group may be younger than the first forward pass
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
        """Make the directory and the drain, and write the waiting events."""
        with memory_shortage.small_arrow():  # only ranks import pyarrow: there can be hundreds of helper processes
            from precdoctor.recording.output.drain import Drain

        recorder = self._recorder
        recorder.drain = Drain(recorder.run, attach.global_rank(), recorder.options, threaded=not ending)
        recorder.evidence = recorder.drain.evidence
        recorder.live = recorder.live or (recorder.current.sampled and not ending)
        _attach_file.note(str(recorder.run), "armed")
        waiting, self._waiting_events = self._waiting_events, []
        if waiting:
            recorder.drain.put(EventBatch(waiting))

    def at_end(self, *, stopped: bool) -> None:
        """As the process ends, claim a directory if there is something to explain and no step has made one.

        ``stopped``: whether the recorder itself ended the run.
        """
        if self.forwards_are_steps and self._recorder.current.complete:
            self._recorder.end_step()  # the last model call has returned, so its step is complete
        if self.is_rank:
            return
        if stopped or self._has_backward or (self._training_entries() and self._may_explain()):
            self.make(ending=True)

    def step_has_begun(self, *, stopped: bool) -> bool:
        """Return whether the run ends inside a step; an evaluation after the last step does not begin one.

        Some scripts evaluate in training mode, with gradients. Such a forward pass belongs to a step only if an
        exception, an interrupt, a NaN or Inf may have prevented its backward pass. ``stopped``: as for :meth:`at_end`.
        """
        recorder = self._recorder
        facts, first = recorder.current, recorder.step == recorder.options.first_step
        trained = facts.losses or recorder.micro_step or facts.bad
        if not (trained or first or stopped or self.forwards_are_steps or self._may_explain()):
            return False
        rows = (e for e in recorder.slots.touched.values() if first or e.site.phase == "train")  # first: eval rows also
        # A float8 cast alone begins no step: weights are also exported to float8 after training.
        return bool(trained or facts.root) or any(
            e.counts_as_training(recorder.names) for e in rows if e.operand is None
        )

    def _may_explain(self) -> bool:
        """Return whether the end of the run may have to do with the last forward pass, or came inside it.

        A call that ``SystemExit`` or an interrupt has left stays on the stack.
        """
        return ends_badly() or bool(getattr(self._recorder.local, "stack", None)) or self._is_sick()

    def _training_entries(self) -> list[Entry]:
        """Return the entries of forward passes that ran in training mode with gradients."""
        touched = self._recorder.slots.touched.values()
        return [e for e in touched if e.site.phase == "train" and not e.site.evaluating]

    def _is_sick(self) -> bool:
        """Return whether a training forward pass met a NaN or +Inf; -Inf alone is a mask. Waits for the device."""
        for entry in self._training_entries():
            ints, _ = kernels.bank(entry.device).row(entry.slot)
            if np.any(ints.cpu().numpy()[[at.NAN, at.POS_INF]]):
                return True
        return False


def may_record(recorder: Recorder) -> bool:
    """Return whether ``--ranks`` includes this rank and memory limits leave room to record it; if not, note why."""
    if recorder.options.ranks is not None and attach.global_rank() not in recorder.options.ranks:
        _attach_file.note(str(recorder.run), "left out")
        return False
    if (why := memory_shortage.shortage()) is not None:
        _attach_file.note(str(recorder.run), "error", why)
        attach.say(f"{why}; training goes on unrecorded")
    return why is None


def cannot_begin(recorder: Recorder, error: Exception) -> None:
    """Turn recording off for this process because it failed to begin; training continues.

    Raises:
        Exception: ``error``, with ``--strict``, or if a signal handler of the user's raised it.
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
