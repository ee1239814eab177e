"""The scope of an observer: one module call, or one backward pass with the module calls whose backward it runs."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.ops.dispatched_ops import sequence_number
from precdoctor.recording.ops.storage_notes import Notes

#: Maximum module calls remembered per step; casts in the backward of later ones have no module.
_MAX_CALLS = 65_536

#: Place of code outside of all modules.
OUTSIDE = Place("", "", "")


@dataclass
class Call:
    """One module call.

    Attributes:
        names: of the tensors it received and of its own parameters.
        first: number of the first autograd node that the call could create.
        backward: whether this stands for the backward of the call.
        missed: whether its casts in the forward pass were not observed; then those in its backward get no rows.
    """

    place: Place
    number: int = 0
    phase: str = "train"
    evaluating: bool = False
    names: Notes[str] = field(default_factory=Notes)
    first: int = 0
    backward: bool = False
    missed: bool = False

    def note_names(self, module: nn.Module, given: Mapping[Any, Any]) -> None:
        """Name the arguments ``input`` (if there are several, ``input.0``, ``input.mask``), and the parameters."""
        found = [(name, x) for name, x in tensor_leaves.tensors(dict(given)) if x.is_floating_point()]
        for name, x in found:
            self.names.put(x, "input" if len(found) == 1 else f"input.{name}")
        for name, parameter in static.held(module, "_parameters").items():
            if issubclass(type(parameter), Tensor):
                self.names.put(parameter, name)


class Calls:
    """The module calls of a step, to find the one that created an autograd node."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._ends: list[int] = []

    def ended(self, call: Call) -> None:
        """Note the end of a call; calls must be noted in the order they end."""
        if len(self._calls) < _MAX_CALLS:
            self._calls.append(call)
            self._ends.append(sequence_number())

    def of_node(self, number: int) -> Call | None:
        """Return the innermost call that created the node with this number; None if there is none."""
        for i in range(bisect.bisect_right(self._ends, number), len(self._calls)):
            if self._calls[i].first <= number:
                return self._calls[i]
        return None

    def clear(self) -> None:
        self._calls.clear()
        self._ends.clear()


def running_node() -> int | None:
    """Return the number of the autograd node that runs on this thread; None if none runs."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
