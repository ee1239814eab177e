"""The part of the recorder that other rooms need to observe a step: its names, its state, and the log.

The microscope, deep scans, the shadow and everything else that only reads take this protocol. Code that writes to slots
takes a :class:`~precdoctor.recording.recorder.Recorder`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from precdoctor.recording.model.module_names import Names
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.evidence import Evidence
from precdoctor.recording.process.threads import Threads
from precdoctor.recording.slots.step_batch import StepFacts


class StepTrace(Protocol):
    """Traces every op of some steps: :class:`~precdoctor.recording.microscope.live.LiveTrace`."""

    @property
    def running(self) -> bool: ...
    def begin_early(self) -> None: ...
    def begin_if_due(self) -> None: ...
    def root_called(self, module: nn.Module, root: str, arguments: Any) -> None: ...
    def look_at(self, kind: str, tensors: Any) -> None: ...
    def end(self, *, died: bool = False, answered: bool = False) -> None: ...


class StepContext(Protocol):
    """The current step and the process that it runs in.

    Attributes:
        state: ``idle``, ``armed`` or ``off``.
        live: statistics are measured: the current step is sampled.
        current: the steps row being built.
        local: thread-local; ``stack`` holds the module calls in progress.
        on_the_clock: whether a hook body is running and charged with its time.
        warnings: sentences to log as soon as there is a log.
        evidence: recorded numbers that justify a deep scan, oldest first.
        when_armed and the like: see :class:`~precdoctor.recording.recorder.Recorder`.
    """

    options: RecordOptions
    names: Names
    state: str
    live: bool
    in_backward: bool
    micro_step: int
    current: StepFacts
    local: threading.local
    threads: Threads
    trace: StepTrace | None
    on_the_clock: bool
    warnings: list[str]
    evidence: deque[Evidence]
    when_armed: list[Callable[[], None]]
    when_step_begins: list[Callable[[], None]]
    when_forked: list[Callable[[], None]]
    when_closing: list[Callable[[], None]]
    when_turned_off: list[Callable[[], None]]

    @property
    def step(self) -> int:
        """The number of the current step attempt."""

    @property
    def traced(self) -> bool:
        """Whether every op of the current step is traced: then no other room needs to observe it."""

    @property
    def halt(self) -> str | None:
        """Why the run must stop; None until ``--halt-on`` asks for it."""

    def arm(self) -> bool:
        """Begin to record. Return False if this process is not to be recorded."""

    def event(self, kind: str, **columns: Any) -> None:
        """Log an event of the current step."""

    def internal_error(self, error: Exception) -> None:
        """Log a defect of the recorder; the third turns recording off. Raises it with ``--strict``."""

    def off_the_clock(self) -> AbstractContextManager[None]:
        """Charge the time inside neither to the step nor to the recorder."""

    def close(self, *, reason: str = "exit", message: str | None = None) -> None:
        """Write the remaining rows and the end marker."""
