"""Which ops of a trace wrote the values that a tensor holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from precdoctor.recording.ops.dispatched_ops import storage_key
from precdoctor.recording.ops.tensor_facts import readable

#: Maximum number of elements, of all tensors together, for each of which the last writer is remembered.
_MAX_ELEMENTS = 1 << 24
#: Maximum number of writers remembered for a tensor that is larger than that.
_MAX_WRITERS = 64


class Writers:
    """The ops, by index, that wrote to each tensor's memory.

    A buffer may be filled part by part (``out[:, t] = ...``). The last writer of each of its elements is remembered
    then, so that only those of non-finite values are blamed.
    """

    def __init__(self) -> None:
        #: By :func:`storage_key`: the last ops that wrote to it since all of it was written.
        self._all: dict[int, tuple[int, ...]] = {}
        #: Likewise, where parts were written: the ops that wrote the whole before, and the last writer of each element
        #: since (-1: none).
        self._parts: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._room = _MAX_ELEMENTS

    def clear(self) -> None:
        self._all.clear()
        self._parts.clear()
        self._room = _MAX_ELEMENTS

    def forget(self, x: Tensor) -> None:
        if (key := storage_key(x)) is not None:
            self._all.pop(key, None)
            self._drop_parts(key)

    def made(self, x: Tensor, index: int) -> None:
        """Note the op that made a tensor."""
        if (key := storage_key(x)) is not None:
            self._all[key] = (index,)
            self._drop_parts(key)

    def wrote(self, x: Tensor, index: int) -> None:
        """Note an op that wrote to all elements of a tensor; it may be a view of a larger one."""
        key = storage_key(x)
        if key is None:
            return
        elements = x.untyped_storage().nbytes() // x.element_size()
        if x.numel() >= elements:
            self.made(x, index)
            return
        before = self._all.get(key, ())
        self._all[key] = (*before, index)[-_MAX_WRITERS:]
        with _disable_current_modes():
            if key not in self._parts and elements <= self._room:
                self._room -= elements
                self._parts[key] = before, torch.full((elements,), -1, dtype=torch.int32, device=x.device)
            if (last := self._last_writers(key, x)) is not None:
                last.fill_(index)

    def of(self, x: Tensor) -> tuple[int, ...]:
        """Return the ops that wrote a tensor's non-finite values, if it has any, else those that wrote to its memory.

        Empty if no op of the trace did.
        """
        key = storage_key(x)
        if key is None or key not in self._parts:
            return self.all_of(x)
        with _disable_current_modes():
            last, real = self._last_writers(key, x), readable(x.detach())
            if last is None or real is None or bool((finite := torch.isfinite(real)).all()):
                return self.all_of(x)
            if finite.dim() > last.dim():
                finite = finite.all(-1)  # of complex numbers
            found = last[~finite].unique().tolist()
        before, _ = self._parts[key]
        return (*(before if -1 in found else ()), *(i for i in found if i >= 0))

    def all_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the ops that wrote to a tensor's memory: to all of it, and to parts of it since."""
        key = storage_key(x)
        return self._all.get(key, ()) if key is not None else ()

    def _last_writers(self, key: int, x: Tensor) -> Tensor | None:
        """Return the last writers of each element of ``x``; None if they are unknown, or are those of another dtype."""
        parts = self._parts.get(key)
        if parts is None or parts[1].numel() != x.untyped_storage().nbytes() // x.element_size():
            return None
        return parts[1].as_strided(x.shape, x.stride(), x.storage_offset())

    def _drop_parts(self, key: int) -> None:
        if (parts := self._parts.pop(key, None)) is not None:
            self._room += parts[1].numel()
