"""Which tensors of a micro-step already have a row, so that none gets two."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.recorder.step_context import StepContext


class RecordedTensors:
    """The tensors that already have a row in this micro-step, with their versions: an in-place write raises a version.

    A live tensor keeps its address from being used again, so a dead reference means "not seen".
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._when = (-1, -1)
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._storages: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        context.when_forked.append(self._clear)

    def _clear(self) -> None:
        self._tensors.clear()
        self._storages.clear()

    def add(self, x: Tensor) -> None:
        """Note a tensor that a row was made of."""
        context = self._context
        now = (context.step, context.micro_step)
        if now != self._when:
            self._clear()
            self._when = now
        entry = (weakref.ref(x), tensor_leaves.version(x))
        self._tensors[id(x)] = entry
        if x.layout is torch.strided and not tensor_leaves.is_wrapped(x):
            self._storages[x.untyped_storage()._cdata] = entry

    def tensor(self, x: Tensor) -> bool:
        """Whether this very tensor has a row."""
        found = self._tensors.get(id(x))
        return found is not None and found[0]() is x and found[1] == tensor_leaves.version(x)

    def storage_of(self, x: Tensor) -> bool:
        """Whether this tensor, or one it is a view of, has a row."""
        if x.layout is not torch.strided or tensor_leaves.is_wrapped(x):
            return self.tensor(x)
        found = self._storages.get(x.untyped_storage()._cdata)
        return found is not None and found[0]() is not None and found[1] == tensor_leaves.version(x)
