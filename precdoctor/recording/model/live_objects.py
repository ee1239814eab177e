"""Objects that live, found without letting another thread see that somebody looks.

The list that ``gc.get_objects`` returns also holds what other threads are about to make: a tuple that is being filled
must have one owner, or CPython raises ``SystemError`` in the thread that fills it, which may be the user's. So the list
must be gone before any other thread runs. No line of Python runs between making and dropping it: the interpreter lets
threads change places only there.
"""

from __future__ import annotations

import gc
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
#: Youngest last: what the search itself makes is at the end of that one, on one of the two walks alone.
_GENERATIONS = (2, 1, 0)
_MORE_THAN_THAT = 256


def instances(kind: type[T]) -> list[T]:
    """Every live object whose type derives from ``kind``, a class without a metaclass.

    Types are asked, not objects: ``isinstance`` reads ``__class__``, which can be somebody's code.
    """
    return _found(issubclass, kind)


def exactly(kind: type[T]) -> list[T]:
    """Every live object of this very type, which may have a metaclass: a check against it would run Python code."""
    return _found(operator.is_, kind)


def _found(test: Callable[[type, type], bool], kind: type) -> list[Any]:
    # Two walks over the same objects in the same order, one for the objects, one for their types. Both have to end: a
    # list that is left half read would hold the iterator that holds it.
    longer = itertools.chain(_objects(), itertools.repeat(None, _MORE_THAN_THAT))
    found: list[Any] = list(itertools.compress(longer, map(test, map(type, _objects()), itertools.repeat(kind))))
    return [o for o in found if test(type(o), kind)]


def _objects() -> Iterator[object]:
    return itertools.chain.from_iterable(map(gc.get_objects, _GENERATIONS))
