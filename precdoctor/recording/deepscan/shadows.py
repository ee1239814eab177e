"""FP64 values beside tensors of the run: what a tensor should have been, found by its identity while it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Owner = TypeVar("Owner")


@dataclass
class Room:
    """FP64 elements that the shadows of one scan may still take, all together."""

    left: int


class Shadows(Generic[Owner]):
    """Tensors of the run with the values they should have, each with the owner that follows it.

    Args:
        room: shared with other shadows of the scan.
        most: shadows held at a time.
    """

    def __init__(self, room: Room, most: int) -> None:
        self._room, self._most = room, most
        self._held: dict[int, tuple[weakref.ref[Tensor], Tensor, Owner]] = {}

    def get(self, x: Tensor) -> tuple[Tensor, Owner] | None:
        """The FP64 values and the owner of a tensor; None without a shadow."""
        found = self._held.get(id(x))
        return (found[1], found[2]) if found is not None and found[0]() is x else None

    def put(self, x: Tensor, value: Tensor, owner: Owner) -> bool:
        """Hold a shadow in place of the one there is; False where there is no room."""
        self.drop(x)
        if len(self._held) >= self._most or value.numel() > self._room.left:
            return False
        self._room.left -= value.numel()
        self._held[id(x)] = (weakref.ref(x), value, owner)
        return True

    def drop(self, x: Tensor) -> None:
        """Let go of a tensor's shadow, if it has one."""
        self._drop(id(x))

    def tidy(self, over: Callable[[Owner], bool]) -> None:
        """Let go of shadows whose tensors are gone, and of those of owners that need them no more."""
        for key in [k for k, (ref, _, owner) in self._held.items() if ref() is None or over(owner)]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._room.left += held[1].numel()
