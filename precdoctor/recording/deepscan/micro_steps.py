"""Detects gradients of a micro-step that are cleared before the next backward pass, although nothing has read them.

A backward pass may have another purpose than the weights' gradients: K-FAC's Fisher statistics, an importance of
weights, a saliency map. Hooks and custom functions then keep something that they made of its gradients, or keep these
until something reads them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from precdoctor.recording.deepscan.scan_facts import Event, Findings
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.ops.dispatched_ops import storage_key, tensors_in
from precdoctor.recording.ops.source_lines import innermost_user_line, line_columns
from precdoctor.recording.ops.storage_notes import Notes

#: Maximum number of weights watched, and of storages made in a backward pass that may be gradients.
_MAX_WATCHED, _MAX_MADE = 16, 4096
#: Ops that clear gradients.
_CLEARS = frozenset(("zero_", "_foreach_zero_", "fill_"))
#: The op behind ``item``.
_TO_NUMBER = "_local_scalar_dense"


class MicroSteps:
    """Watches the gradients of a step's first micro-step."""

    def __init__(self, findings: Findings, targets: Targets) -> None:
        self._findings, self._targets = findings, targets
        #: What the backward pass has written; whether code of the user's, such as a hook, made it of a gradient.
        self._made: Notes[bool] = Notes()
        #: Whether such code read a number from a gradient, or detached one, as NumPy's view of a tensor does.
        self._exported = False
        #: Weights with a non-zero gradient, that gradient, root and module.
        self._watched: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], str, str]] = []
        #: The fact that the gradients were dropped, unless something that is left of that pass is read later; that.
        self._dropped: Event | None = None
        self._left: Notes[bool] = Notes()

    @property
    def watches(self) -> bool:
        """Whether there are gradients that may be read or dropped."""
        return bool(self._watched) or self._dropped is not None

    def note_results(self, name: str, args: Any, result: Any) -> None:
        """Note what an op of the backward pass writes: each may be, or become, a gradient, or be made of one."""
        users = innermost_user_line(past_own=True) is not None  # a hook, or a custom function
        if name == _TO_NUMBER:
            self._exported |= users and args[0].is_floating_point() and self._is_made(args[0])
            return
        within = name.endswith("_")
        self._note_late_use(args)
        kept = users and any(map(self._is_made, tensors_in(args[1:] if within else args)))
        self._exported |= kept and name == "detach"
        old = users and within  # memory that was there before, such as a weight's
        given = () if within else {storage_key(x) for x in tensors_in(args)}  # a view of an activation makes nothing
        for x in tensors_in(args[:1] if within else result) if len(self._made) < _MAX_MADE else ():
            if kept or not (old or self._is_made(x) or storage_key(x) in given):
                self._made.put(x, kept)

    def _is_made(self, x: Tensor) -> bool:
        """Return whether the backward pass has written the tensor."""
        return self._made.get(x) is not None

    def note_use(self, name: str, args: Any, kwargs: Any) -> None:
        """Stop watching if an op outside the backward pass reads a gradient and does not clear it: it is used then."""
        if name in _CLEARS:
            return
        self._note_late_use((args, kwargs))
        for x in tensors_in((args, kwargs)) if self._watched else ():
            if self._is_made(x):
                self._watched = []
                return

    def _note_late_use(self, operands: Any) -> None:
        """Withdraw the fact if an op reads what is left of the pass."""
        if self._dropped is not None and any(self._left.get(x) is not None for x in tensors_in(operands)):
            self._dropped = None

    def backward_ended(self, micro_step: int) -> None:
        """Watch the weights that got a non-zero gradient in the first micro-step."""
        self._watched = []
        for root, module, parameter, grad in self._targets.gradients(_MAX_WATCHED) if micro_step == 0 else ():
            if bool(grad.any()):
                self._watched.append((weakref.ref(parameter), weakref.ref(grad), root, module))
        if not self._watched:
            self._forget()

    def backward_begins(self, micro_step: int) -> None:
        """Make a fact if all watched gradients were cleared as the second backward pass begins."""
        watched, self._watched = self._watched, []
        cleared = micro_step == 1 and bool(watched) and all(_is_cleared(p(), g()) for p, g, _, _ in watched)
        used = cleared and (self._exported or self._is_kept())
        if used or not cleared:
            self._forget()
            return
        self._left, self._made = self._made, Notes()
        self._left.forget(self._targets.gradient_storages())
        _, _, root, module = watched[-1]
        place = {"root": root, "module": module, "op": "zero_grad", **line_columns(innermost_user_line(past_own=True))}
        data = {"phase": "backward", "micro_step": micro_step, "weights": len(watched)}
        self._dropped = {**place, "data": data}

    def finish(self) -> None:
        """Note the fact, once the window is over."""
        if self._dropped is not None:
            self._findings.add_event("dropped", self._dropped, 1.0)
        self._dropped = None

    def _is_kept(self) -> bool:
        """Return whether something that user code made of the gradients exists, other than the weights' gradients."""
        return bool({key for key, note in self._made.living() if note} - self._targets.gradient_storages())

    def _forget(self) -> None:
        self._made.clear()
        self._exported = False


def _is_cleared(parameter: Tensor | None, before: Tensor | None) -> bool:
    """Return whether the gradient that a parameter had is deleted, or zero."""
    if parameter is None:
        return False
    return before is None if parameter.grad is None else parameter.grad is before and not bool(parameter.grad.any())
