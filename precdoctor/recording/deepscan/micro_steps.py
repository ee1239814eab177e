"""Detects gradients of a micro-step that are cleared before the next backward pass, although nothing has read them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from precdoctor.recording.deepscan.scan_facts import Findings
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.ops.dispatched_ops import tensors_in
from precdoctor.recording.ops.source_lines import innermost_user_line, line_columns
from precdoctor.recording.ops.storage_notes import Notes

#: Maximum number of weights watched, and of storages made in a backward pass that may be gradients.
_MAX_WATCHED, _MAX_MADE = 16, 4096
#: Ops that clear gradients.
_CLEARS = frozenset(("zero_", "_foreach_zero_", "fill_"))


class MicroSteps:
    """Watches the gradients of a step's first micro-step."""

    def __init__(self, findings: Findings, targets: Targets) -> None:
        self._findings, self._targets = findings, targets
        self._made: Notes[bool] = Notes()
        #: Weights with a non-zero gradient, that gradient, root and module.
        self._watched: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], str, str]] = []

    @property
    def watches(self) -> bool:
        """Whether there are gradients that may be read or dropped."""
        return bool(self._watched)

    def note_results(self, result: Any) -> None:
        """Note results of an op of the backward pass: each may be, or become, a gradient."""
        for x in tensors_in(result) if len(self._made) < _MAX_MADE else ():
            self._made.put(x, True)

    def note_use(self, name: str, args: Any, kwargs: Any) -> None:
        """Stop watching if an op outside the backward pass reads a gradient and does not clear it: it is used then."""
        if name in _CLEARS:
            return
        for x in tensors_in((args, kwargs)):
            if self._made.get(x):
                self._watched = []
                return

    def backward_ended(self, micro_step: int) -> None:
        """Watch the weights that got a non-zero gradient in the first micro-step."""
        self._watched = []
        for root, module, parameter, grad in self._targets.gradients(_MAX_WATCHED) if micro_step == 0 else ():
            if bool(grad.any()):
                self._watched.append((weakref.ref(parameter), weakref.ref(grad), root, module))
        if not self._watched:
            self._made.clear()

    def backward_begins(self, micro_step: int) -> None:
        """Note a fact if all watched gradients were cleared as the second backward pass begins."""
        watched, self._watched = self._watched, []
        self._made.clear()
        if micro_step != 1 or not watched or not all(_is_cleared(p(), g()) for p, g, _, _ in watched):
            return
        _, _, root, module = watched[-1]
        place = {"root": root, "module": module, "op": "zero_grad", **line_columns(innermost_user_line(past_own=True))}
        data = {"phase": "backward", "micro_step": micro_step, "weights": len(watched)}
        self._findings.add_event("dropped", {**place, "data": data}, 1.0)


def _is_cleared(parameter: Tensor | None, before: Tensor | None) -> bool:
    """Return whether the gradient that a parameter had is deleted, or zero."""
    if parameter is None:
        return False
    return before is None if parameter.grad is None else parameter.grad is before and not bool(parameter.grad.any())
