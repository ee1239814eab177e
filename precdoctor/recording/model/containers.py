"""Opens and rebuilds containers of any class without running a line of their code.

Batches come as tuples and dictionaries, as dataclasses, named tuples, ``BatchEncoding``, ``Data`` or ``TensorDict``.
Their ``items``, ``__getattr__``, ``__iter__``, ``__copy__`` and properties may do anything, so none of them is called:
built-in types are read by their own methods, objects by their instance dictionary and their slots.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.model.object_copies import shallow_copy

#: Most elements read of one container.
MAX_ELEMENTS = 1024
#: Types that are never opened: modules hold weights, not data of a batch, and the rest is code.
_CLOSED = (nn.Module, type, types.FunctionType, types.ModuleType, types.CodeType, types.GeneratorType)
#: Attributes of classes made to hold values: dataclasses and attrs.
_RECORDS = ("__dataclass_fields__", "__attrs_attrs__")


@dataclass(slots=True, eq=False)
class Opened:
    """A container whose elements have been read.

    Attributes:
        items: its elements by key, the first :data:`MAX_ELEMENTS`; none of a dictionary that has more.
        is_object: whether the keys are attributes.
    """

    _value: Any
    items: dict[Any, Any]
    is_object: bool = False

    def remade(self, changed: Mapping[Any, Any]) -> Any:
        """Return the same container with some elements replaced; the container itself if it cannot be rebuilt."""
        try:
            return shallow_copy(self._value, changed)
        except (TypeError, AttributeError):
            return self._value  # its layout is not that of Python's own classes


def opened(value: Any, *, objects: bool) -> Opened | None:
    """Return a container with its elements; None for everything else.

    Args:
        value: anything.
        objects: also open objects of any class with attributes, not only mappings, dataclasses and attrs classes.
    """
    kind = type(value)
    if kind in (tuple, list) and len(value) <= MAX_ELEMENTS:  # the usual case
        return Opened(value, dict(enumerate(value)))
    if issubclass(kind, dict):
        return Opened(value, dict(dict.items(value)) if dict.__len__(value) <= MAX_ELEMENTS else {})
    if issubclass(kind, (tuple, list)):
        base = list if issubclass(kind, list) else tuple
        return Opened(value, dict(enumerate(itertools.islice(base.__iter__(value), MAX_ELEMENTS))))
    if issubclass(kind, _CLOSED) or not (objects or _is_record(kind)):
        return None
    attributes = _attributes(value, kind)
    return Opened(value, attributes, is_object=True) if attributes else None


def names(found: Opened) -> list[str]:
    """Return the keys as words: field names of named tuples, positions for keys that are objects."""
    kind = type(found._value)
    if kind is tuple or kind is list:
        return list(map(str, found.items))
    fields = static.of_class(found._value, "_fields") if issubclass(kind, tuple) else None
    if type(fields) is tuple and len(fields) >= len(found.items) and all(type(f) is str for f in fields):
        return [static.text(name) for name in fields[: len(found.items)]]
    return [_word(key, i) for i, key in enumerate(found.items)]


def hides(found: Opened, key: Any) -> bool:
    """Return whether an attribute is where a class stores its elements (``_store``), and not a name that users see."""
    return found.is_object and (key[:1] == "_" or (key == "data" and UserDict in static.mro(type(found._value))))


def _word(key: Any, position: int) -> str:
    """Return a key as a word; its position if printing it would run code."""
    if type(key) in static.KEYS:
        return static.text(key)
    if type(key) is tuple and all(type(k) in static.KEYS for k in key):
        return "-".join(map(static.text, key))
    return str(position)


def _is_record(kind: type) -> bool:
    """Return whether a class was made to hold values: a mapping, dataclass or attrs class."""
    return Mapping in static.mro(kind) or any(static.defines(kind, name) for name in _RECORDS)


def _attributes(value: Any, kind: type) -> dict[str, Any]:
    own = itertools.islice(dict.items(static.own(value)), MAX_ELEMENTS)
    found = {n: x for n, x in own if type(n) is str}
    for slot in static.slots(kind):
        with contextlib.suppress(AttributeError):  # the slot is empty
            found.setdefault(slot.__name__, slot.__get__(value))
    return found
