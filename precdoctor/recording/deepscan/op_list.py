"""The lists of ops of a process (``record --ops``): on which steps, and how they reach the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from precdoctor.recording.deepscan.op_mode import OpMode
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.step_batch import OpBatch


class OpList:
    """Asks a :class:`~precdoctor.recording.deepscan.window.StepWindow` for the steps whose ops are listed."""

    without_modules = True

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the options there are now."""
        #: No step's ops are listed.
        self.off = not self._context.options.ops
        self._mode: OpMode | None = None
        self._refused: set[str] = set()
        self._done: set[int] = set()

    def mode(self, step: int) -> WindowMode | None:
        """A new list, where the step is one of those asked for."""
        options = self._context.options
        if step not in options.ops or step in self._done:
            return None
        self._mode = OpMode(Targets(self._context.names, threads=self._context.threads), redact=options.redact_names)
        return self._mode

    def refused(self, root: str, why: str) -> None:
        """Log the reason, once."""
        self._mode = None
        self._done.add(self._context.step)
        if why not in self._refused:
            self._refused.add(why)
            self._context.event("ops", root=root, data={"outcome": "refused", "why": why})

    def region(self, owner: Any, args: Any) -> Callable[[Any], None] | None:
        """A compiled function, or a module compiled in place, is called; what is returned takes its result."""
        mode = self._mode
        if mode is None or mode.over:
            return None
        place = self._context.names.find(owner) if issubclass(type(owner), nn.Module) else None
        mode.enter_region(owner, args, (place.root, place.module) if place is not None else None)
        return lambda result: mode.leave_region(owner, result)

    def ended(self, mode: WindowMode) -> None:
        """The step is over: hand its rows over."""
        assert isinstance(mode, OpMode), "made here"
        context, table, self._mode = self._context, mode.table, None
        mode.let_go()
        self._done.add(context.step)
        if mode.failure is not None:
            why = f"{type(mode.failure).__name__}: {mode.failure}"[:500]
            context.event("warning", data={"message": f"the list of ops of step {context.step} was dropped: {why}"})
            context.event("ops", data={"outcome": "dropped", "why": why})
            return
        data = {"ops": table.ops, "tensors": table.rows, "compiled": mode.compiled, "spent_ns": mode.spent_ns}
        context.event("ops", data={"outcome": "done", "complete": not table.full, **data})
        if table.rows:
            context.current.ops = OpBatch(context.step, table.columns(), table.rows)
