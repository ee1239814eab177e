"""Notes on tensors, found again through every tensor that shares their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precdoctor.recording.ops.dispatched_ops import storage_key

V = TypeVar("V")


class Notes(Generic[V]):
    """Notes on tensors, keyed by their memory.

    A weak reference to the storage keeps its key from being used again: the note of a living tensor is its own.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, V]] = {}

    def get(self, x: Tensor) -> V | None:
        """Return the note on a tensor's memory; None without one."""
        key = storage_key(x)
        return None if key is None else self.at(key)

    def at(self, key: int) -> V | None:
        """Return the note by :func:`storage_key`; None without one."""
        found = self._notes.get(key)
        return None if found is None else found[1]

    def put(self, x: Tensor, note: V) -> None:
        if (key := storage_key(x)) is not None:
            self._notes[key] = (StorageWeakRef(x.untyped_storage()), note)

    def drop(self, x: Tensor) -> None:
        """Delete the note on a tensor's memory."""
        if self._notes and (key := storage_key(x)) is not None:
            self._notes.pop(key, None)

    def forget(self, keys: Iterable[int]) -> None:
        """Delete the notes on the memory of these :func:`storage_key`."""
        for key in keys:
            self._notes.pop(key, None)

    def living(self) -> list[tuple[int, V]]:
        """Return storage keys and notes of memory that still exists."""
        return [(key, note) for key, (storage, note) in self._notes.items() if not storage.expired()]

    def clear(self) -> None:
        self._notes.clear()

    def __len__(self) -> int:
        """Return the number of notes, those on memory that is gone included."""
        return len(self._notes)
