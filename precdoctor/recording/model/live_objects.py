"""Objects that live, found without letting another thread see that somebody looks.

The list that ``gc.get_objects`` returns also holds what other threads are about to make: a tuple that is being filled
must have one owner, or CPython raises ``SystemError`` in the thread that fills it, which may be the user's. So the list
must be gone before any other thread runs. No line of Python runs between making and dropping it: the interpreter lets
threads change places only there.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from itertools import chain, compress, repeat
from typing import Any, TypeVar

T = TypeVar("T")


def instances(kind: type[T]) -> list[T]:
    """Every live object whose type derives from ``kind``, a class without a metaclass.

    Types are asked, not objects: ``isinstance`` reads ``__class__``, which can be somebody's code.
    """
    return _found(issubclass, kind)


def exactly(kind: type[T]) -> list[T]:
    """Every live object of this very type, which may have a metaclass: a check against it would run Python code."""
    return _found(operator.is_, kind)


def _found(test: Callable[[type, type], bool], kind: type) -> list[Any]:
    # One list, walked through twice in step, for the objects and for their types. A second call of ``get_objects``
    # would let audit hooks run while the first list is there, and they may be Python: filelock has one. So may
    # finalizers and callbacks be that a collection runs.
    collects = gc.isenabled()
    gc.disable()
    try:
        twice: Any = chain.from_iterable(map(repeat, map(gc.get_objects, (None,)), (2,)))
        chosen: Any = map(map, (test,), map(map, (type,), twice), (repeat(kind),))
        return list(chain.from_iterable(map(compress, twice, chosen)))
    finally:
        if collects:
            gc.enable()
