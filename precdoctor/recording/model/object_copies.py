"""Copies the user's objects and containers for a replay. None of their own methods runs, not even ``__init__``."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from precdoctor.recording.model import static

#: Types whose values a copy shares with the original.
_SHARED: Final = (BuiltinFunctionType, FunctionType, ModuleType, type, torch.dtype, torch.device)
#: Builtin containers; these must create the instances of their subclasses, derived classes first.
_CONTAINERS: Final = (OrderedDict, defaultdict, dict, list, tuple)


class UnreadableError(TypeError):
    """An object that cannot be copied without running its code."""


def shallow_copy(x: Any, changed: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """Return a second object with the same attributes; its constructor, ``__copy__`` and ``__getstate__`` do not run.

    Dictionaries, lists and tuples, and instances of classes derived from them, get the same entries. ``changed``
    replaces some: entries by key or position; of other objects, attributes by name.

    Raises:
        UnreadableError: its class stores more than that, or defines ``__del__``, or hashing a key may run code.
    """
    kind = type(x)
    if static.defines(kind, "__del__"):
        raise UnreadableError(f"{kind.__name__} defines __del__")
    base: Any = next((b for b in (*_CONTAINERS, SimpleNamespace) if issubclass(kind, b)), object)
    attributes = {} if base in _CONTAINERS else changed
    try:
        given = [[changed.get(i, v) for i, v in enumerate(tuple.__iter__(x))]] if base is tuple else []
        twin = base.__new__(kind, *given)
    except TypeError as error:
        raise UnreadableError(str(error)) from error
    if issubclass(base, dict):
        for key, value in dict.items(x):
            base.__setitem__(twin, _key(key, {}), changed.get(key, value))
        if base is defaultdict:
            defaultdict.__dict__["default_factory"].__set__(twin, defaultdict.__dict__["default_factory"].__get__(x))
    elif base is list:
        list.extend(twin, [changed.get(i, v) for i, v in enumerate(list.__iter__(x))])
    static.own(twin).update([(n, attributes.get(n, v)) for n, v in dict.items(static.own(x))])
    for slot in static.slots(kind):
        with contextlib.suppress(AttributeError):  # the slot is empty
            name = slot.__name__
            slot.__set__(twin, attributes[name] if name in attributes else slot.__get__(x))
    return twin


def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of an object and of everything in it.

    Args:
        x: any object. Tensors are cloned; functions, classes and Python modules are shared.
        memo: copies by ``id`` of the original; objects in it are not copied again.

    Raises:
        UnreadableError: an object in it cannot be copied without running its code.
    """
    if id(x) in memo:
        return memo[id(x)]
    kind = type(x)
    twin: Any
    if kind in static.KEYS or kind in (complex, bytes) or issubclass(kind, _SHARED):
        return x
    if issubclass(kind, Tensor):
        twin = x.detach().clone()
        twin = nn.Parameter(twin, x.requires_grad) if kind is nn.Parameter else twin.requires_grad_(x.requires_grad)
    elif kind in (list, deque, dict, OrderedDict, defaultdict):
        twin = memo[id(x)] = _empty_like(x)
        if kind in (list, deque):
            twin.extend([deep_copy(v, memo) for v in x])
        else:
            twin.update([(_key(k, memo), deep_copy(v, memo)) for k, v in dict.items(x)])
    elif kind is tuple:
        twin = tuple(deep_copy(v, memo) for v in x)
    elif kind in (set, frozenset):
        twin = kind([_key(k, memo) for k in x])
    elif kind is MethodType:
        twin = MethodType(x.__func__, deep_copy(x.__self__, memo))
    elif kind.__module__ == "numpy":
        twin = x.copy()
    elif issubclass(kind, _CONTAINERS):
        raise UnreadableError(f"{kind.__name__} is a container of its own")
    else:
        twin = memo[id(x)] = shallow_copy(x)
        there = static.own(twin)
        there.update([(name, deep_copy(value, memo)) for name, value in there.items()])
        for slot in static.slots(kind):
            with contextlib.suppress(AttributeError):
                slot.__set__(twin, deep_copy(slot.__get__(x), memo))
    memo[id(x)] = twin
    return twin


def _empty_like(x: Any) -> Any:
    """Return an empty container of the same class and settings."""
    if type(x) is deque:
        return deque(maxlen=x.maxlen)
    return defaultdict(x.default_factory) if type(x) is defaultdict else type(x)()


def _key(key: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of a dictionary key. Raises UnreadableError if hashing the key may run code."""
    if type(key) not in static.KEYS and type(key) not in (Tensor, nn.Parameter):
        raise UnreadableError(f"a {type(key).__name__} is a key")
    return memo.get(id(key), key)
