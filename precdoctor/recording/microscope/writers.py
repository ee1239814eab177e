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
    """The ops, by index, that last wrote to each tensor's memory.

    A buffer may be filled part by part (``out[:, t] = ...``). The last writer of each of its elements is remembered
    then, so that only those of non-finite values are blamed.
    """

    def __init__(self) -> None:
        #: By :func:`storage_key`: the ops that wrote to all of it, or to unknown parts.
        self._whole: dict[int, tuple[int, ...]] = {}
        #: Likewise: the last op that wrote to each element, -1 for none since the whole was written.
        self._parts: dict[int, Tensor] = {}
        self._room = _MAX_ELEMENTS

    def clear(self) -> None:
        """Forget all writers."""
        self._whole.clear()
        self._parts.clear()
        self._room = _MAX_ELEMENTS

    def forget(self, x: Tensor) -> None:
        """Forget the writers of a tensor's memory."""
        if (key := storage_key(x)) is not None:
            self._whole.pop(key, None)
            self._drop_parts(key)

    def made(self, x: Tensor, index: int) -> None:
        """Note the op that made a tensor."""
        if (key := storage_key(x)) is not None:
            self._whole[key] = (index,)
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
        parts = self._parts.get(key)
        with _disable_current_modes():
            if parts is None and elements <= self._room:
                self._room -= elements
                parts = self._parts[key] = torch.full((elements,), -1, dtype=torch.int32, device=x.device)
            if parts is not None and parts.numel() == elements:
                parts.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(index)
            else:
                self._whole[key] = (*self._whole.get(key, ()), index)[-_MAX_WRITERS:]

    def of(self, x: Tensor) -> tuple[int, ...] | None:
        """Return the ops that wrote a tensor's non-finite values, or all of its values if it has none.

        None if no op of the trace did.
        """
        key = storage_key(x)
        parts = self._parts.get(key) if key is not None else None
        if key is None or parts is None:
            return self._whole.get(key) if key is not None else None
        if parts.numel() != x.untyped_storage().nbytes() // x.element_size():
            return self.all_of(x)
        with _disable_current_modes():
            last = parts.as_strided(x.shape, x.stride(), x.storage_offset())
            real = readable(x.detach())
            bad = None if real is None else ~torch.isfinite(real)
            if bad is not None and bad.dim() > last.dim():
                bad = bad.any(-1)  # of complex numbers
            found = (last if bad is None or not bool(bad.any()) else last[bad]).unique().tolist()
        whole = self._whole.get(key, ()) if -1 in found else ()
        return (*whole, *(i for i in found if i >= 0)) or None

    def all_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the ops that wrote to any part of a tensor's memory."""
        key = storage_key(x)
        if key is None:
            return ()
        parts = self._parts.get(key)
        found = () if parts is None else (i for i in parts.unique().tolist() if i >= 0)
        return (*self._whole.get(key, ()), *found)

    def _drop_parts(self, key: int) -> None:
        if (parts := self._parts.pop(key, None)) is not None:
            self._room += parts.numel()
