"""Opens and rebuilds containers of any class without running a line of their code.

Batches come as tuples and dictionaries, as dataclasses, named tuples, ``BatchEncoding``, ``Data`` or ``TensorDict``.
Their ``items``, ``__getattr__``, ``__iter__``, ``__copy__`` and properties may do anything, so none of them is called:
built-in types are read by their own methods, objects by their instance dictionary and their slots.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from precdoctor.recording.model import static

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
        value, kind = self._value, type(self._value)
        if _of_class(kind, "__del__") is not None:
            return value  # it would run when the copy is deleted
        try:
            if self.is_object:
                return _object_like(value, kind, changed)
            if issubclass(kind, dict):
                return _dict_like(value, kind, changed)
            return _sequence_like(value, kind, changed)
        except (TypeError, AttributeError):
            return value  # its layout is not that of Python's own classes


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
    fields = _of_class(kind, "_fields") if issubclass(kind, tuple) else None
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
    return Mapping in static.mro(kind) or any(_of_class(kind, name) is not None for name in _RECORDS)


def _of_class(kind: type, name: str) -> Any:
    """Return an attribute as stored in a class or its bases; None if there is none."""
    return next((found[name] for base in static.mro(kind) if name in (found := static.members(base))), None)


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class and its bases, by name."""
    found: dict[str, types.MemberDescriptorType] = {}
    for base in static.mro(kind):
        if "__slots__" in (own := static.members(base)):
            found |= {n: d for n, d in own.items() if type(d) is types.MemberDescriptorType and n not in found}
    return found


def _attributes(value: Any, kind: type) -> dict[str, Any]:
    """Return slots and instance dictionary, by name."""
    own = itertools.islice(dict.items(static.own(value)), MAX_ELEMENTS)
    found = {n: x for n, x in own if type(n) is str}
    for name, slot in _slots(kind).items():
        with contextlib.suppress(AttributeError):  # the slot is empty
            found.setdefault(name, slot.__get__(value))
    return found


def _sequence_like(value: Any, kind: type, changed: Mapping[Any, Any]) -> Any:
    made: Any
    if issubclass(kind, list):
        made = list.__new__(kind)
        list.extend(made, (changed.get(i, x) for i, x in enumerate(list.__iter__(value))))
    else:
        items = [changed.get(i, x) for i, x in enumerate(tuple.__iter__(value))]
        new: Any = tuple.__new__
        made = new(kind, items)
    return _with_attributes(made, value, kind, {})


def _object_like(value: Any, kind: type, changed: Mapping[Any, Any]) -> Any:
    base: Any = types.SimpleNamespace if types.SimpleNamespace in static.mro(kind) else object
    return _with_attributes(base.__new__(kind), value, kind, changed)


def _dict_like(value: Any, kind: type, changed: Mapping[Any, Any]) -> Any:
    """Return a dictionary of the same class with some elements replaced; itself if a key is an object."""
    if not all(type(k) in static.KEYS for k in dict.keys(value)):
        return value  # their hash is user code
    base: type[dict[Any, Any]] = OrderedDict if OrderedDict in static.mro(kind) else dict
    made: Any = base.__new__(kind)
    for key, item in dict.items(value):
        base.__setitem__(made, key, changed.get(key, item))
    return _with_attributes(made, value, kind, {})


def _with_attributes(made: Any, value: Any, kind: type, changed: Mapping[Any, Any]) -> Any:
    """Copy the attributes and slots of ``value`` to ``made``, some of them replaced; return ``made``."""
    if own := static.own(value):
        static.own(made).update({**own, **{n: x for n, x in changed.items() if n in own}})
    for name, slot in _slots(kind).items():
        with contextlib.suppress(AttributeError):
            slot.__set__(made, changed[name] if name in changed else slot.__get__(value))
    return made
