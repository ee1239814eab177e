"""Finds losses that a scaler was given, while ``backward`` began at the unscaled loss."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.recorder.step_context import StepContext

#: Most losses remembered between two steps of a scaler.
_MAX_GIVEN = 64


class ScaledLosses:
    """Counts a scaler's steps whose backward passes all started from a loss given to ``scale``, not from its result."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        context.when_forked.append(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        #: Backward passes since the last step, and how many of them started from an unscaled loss.
        self._passes = self._unscaled = 0
        self._attempts = self._steps = 0
        #: File and line of the ``backward`` call in the first such step.
        self._line: tuple[str | None, int | None] = None, None

    def given(self, losses: Any) -> None:
        """Remember the losses that ``scale`` is given."""
        if len(self._given) < _MAX_GIVEN:
            self._given += [weakref.ref(x) for _, x in tensor_leaves.tensors(losses)]

    def backward_begins(self, roots: list[Any]) -> None:
        if not self._given:
            self._passes += 1
            return
        given = [known for x in self._given if (known := x()) is not None]
        self._passes += 1
        self._unscaled += bool(roots) and all(any(root is x for x in given) for root in roots)

    def stepped(self) -> None:
        """At the end of a scaler's ``step``, skipped or not, count it; report the first with unscaled losses only."""
        if not self._passes:
            return  # a step of another optimizer after the same passes
        unscaled = self._unscaled == self._passes
        self._attempts += 1
        self._steps += unscaled
        self._given.clear()
        self._passes = self._unscaled = 0
        if unscaled and self._steps == 1:
            facts = self._context.current
            self._line = facts.backward_file, facts.backward_line
            self._report()

    def run_ends(self) -> None:
        if self._steps > 1:
            self._report()

    def _report(self) -> None:
        data = {
            "message": "a scaler unscales gradients of losses that went into backward without its scale",
            "what": "scale-unused",
            "steps": self._steps,
            "of": self._attempts,
        }
        self._context.event("warning", file=self._line[0], line=self._line[1], data=data)
