"""Losses that a scaler was given to scale, and that went into ``backward`` as they were all the same."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.recorder.step_context import StepContext

#: Losses remembered between two steps of a scaler.
_MAX_GIVEN = 64


class ScaledLosses:
    """Counts the steps of a scaler all of whose backward passes began at losses that it was given, unscaled."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        context.when_forked.append(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        #: Backward passes since the last step, and those of a loss that was given to ``scale``.
        self._passes = self._unscaled = 0
        self._attempts = self._steps = 0
        #: Where the first such step called ``backward``.
        self._line: tuple[str | None, int | None] = None, None

    def given(self, losses: Any) -> None:
        """``scale`` was called for these."""
        if len(self._given) < _MAX_GIVEN:
            self._given += [weakref.ref(x) for _, x in tensor_leaves.tensors(losses)]

    def backward_begins(self, roots: list[Any]) -> None:
        """From these tensors."""
        if not self._given:
            self._passes += 1
            return
        given = [known for x in self._given if (known := x()) is not None]
        self._passes += 1
        self._unscaled += bool(roots) and all(any(root is x for x in given) for root in roots)

    def stepped(self) -> None:
        """A scaler's ``step`` has ended, whatever it found."""
        if not self._passes:
            return  # of another optimizer, with the gradients of the same passes
        unscaled = self._unscaled == self._passes
        self._attempts += 1
        self._steps += unscaled
        self._given.clear()
        self._passes = self._unscaled = 0
        if unscaled and self._steps == 1:
            facts = self._context.current
            self._line = facts.backward_file, facts.backward_line
            self._tell()

    def run_ends(self) -> None:
        """How many there were in the end."""
        if self._steps > 1:
            self._tell()

    def _tell(self) -> None:
        data = {
            "message": "a scaler unscales gradients of losses that went into backward without its scale",
            "what": "scale-unused",
            "steps": self._steps,
            "of": self._attempts,
        }
        self._context.event("warning", file=self._line[0], line=self._line[1], data=data)
