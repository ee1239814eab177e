"""Lists live objects without letting another thread notice.

The list that ``gc.get_objects`` returns also holds objects that other threads are still making: a tuple that is being
filled must have one owner, or CPython raises ``SystemError`` in the thread that fills it, which may be the user's. So
the list must be gone before any other thread runs. No line of Python runs between making and dropping it: the
interpreter switches threads only there.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from itertools import chain, compress, repeat
from typing import Any, TypeVar

T = TypeVar("T")


def instances(kind: type[T]) -> list[T]:
    """Return every live object whose type derives from ``kind``, a class without a metaclass.

    Tests types, not objects: ``isinstance`` reads ``__class__``, which may run user code.
    """
    return _live(issubclass, kind)


def exactly(kind: type[T]) -> list[T]:
    """Return every live object whose type is ``kind``. It may have a metaclass, whose checks would run Python code."""
    return _live(operator.is_, kind)


def _live(test: Callable[[type, type], bool], kind: type) -> list[Any]:
    """Return every live object whose type passes ``test`` with ``kind``."""
    # One list, iterated twice in step, for the objects and for their types. A second call of ``get_objects`` would let
    # audit hooks run while the first list exists, and they may be Python: filelock has one. So may the finalizers and
    # callbacks that a collection runs; hence no collection.
    collects = gc.isenabled()
    gc.disable()
    try:
        twice: Any = chain.from_iterable(map(repeat, map(gc.get_objects, (None,)), (2,)))
        chosen: Any = map(map, (test,), map(map, (type,), twice), (repeat(kind),))
        return list(chain.from_iterable(map(compress, twice, chosen)))
    finally:
        if collects:
            gc.enable()
