"""Reads the user's objects without running a line of their code, as :func:`inspect.getattr_static` does.

A module's ``__getstate__``, ``__len__`` or ``__getattr__``, a property, an ``items()``: each of these may write to the
object, draw a random number, advance a stream or raise. So types are tested instead of objects, containers are read
with the methods of the builtin type that they derive from, and attributes are read where they are stored. A value that
cannot be read in this way is not recorded.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

K = TypeVar("K")
V = TypeVar("V")
#: Return the bases of a class, itself first; return the attributes defined in the class itself.
mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
members: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
#: Return the instance dictionary of a module. Not a Python function, because it runs on every module call.
module_dict: Callable[[nn.Module], dict[str, Any]] = nn.Module.__dict__["__dict__"].__get__
#: Return the instance dictionary of an optimizer; runs for every parameter.
optimizer_dict: Callable[[torch.optim.Optimizer], dict[str, Any]] = torch.optim.Optimizer.__dict__["__dict__"].__get__
#: Types of descriptors that are C code: slots and ``__dict__``.
_STORED: Final = (MemberDescriptorType, GetSetDescriptorType)
#: Types of keys that hash, compare and print without user code.
KEYS: Final = frozenset((str, int, bool, float, type(None)))
#: Types of values that print without user code.
_PRINTED: Final = KEYS | {complex, bytes, torch.dtype, torch.device, torch.Size}
#: Most characters of a key or class name in the log, parts of a tuple key, and entries read of a container.
_MAX_NAME: Final = 120
_MAX_PARTS: Final = 8
_MAX_ENTRIES: Final = 1024
#: Most elements of a list in a setting, and levels of nested lists.
_MAX_SETTINGS, _MAX_NEST = 64, 4
_MISSING: Final = object()
#: Types without behaviour of their own. Tested instead of ``isinstance``, which with a Parameter runs Python code.
TENSORS: Final = frozenset((Tensor, nn.Parameter))
_DICTIONARIES: Final = (dict, OrderedDict)


# --- objects ---------------------------------------------------------------------------------------------------------


def own(x: Any) -> dict[str, Any]:
    """Return the instance dictionary of any object itself, not a copy; an empty one if the object has none."""
    for kind in mro(type(x)):
        found = members(kind).get("__dict__")
        if type(found) in _STORED:
            there = cast("Any", found).__get__(x)
            return there if issubclass(type(there), dict) else {}
    return {}


def attribute(x: Any, name: str, default: Any = None) -> Any:
    """Return a stored attribute: the object's own, a slot, or a plain value of its class; else ``default``."""
    found = dict.get(own(x), name, _MISSING)
    return of_class(x, name, default) if found is _MISSING else found


def of_class(x: Any, name: str, default: Any = None) -> Any:
    """Return the value of a slot, or a class attribute that is no descriptor; else ``default``."""
    for kind in mro(type(x)):
        found = members(kind).get(name, _MISSING)
        if type(found) is MemberDescriptorType:
            try:
                return found.__get__(x)
            except AttributeError:
                return default
        if found is not _MISSING:
            return default if any("__get__" in members(k) for k in mro(type(found))) else found
    return default


def slots(kind: type) -> list[MemberDescriptorType]:
    """Return the slots of a class and its bases, without those of a builtin base, which are read-only."""
    own = (found for each in mro(kind) if "__slots__" in (found := members(each)))
    return [m for found in own for m in found.values() if type(m) is MemberDescriptorType]


def defines(kind: type, name: str) -> bool:
    """Return whether a class, or a base of it other than ``object``, defines this name."""
    for each in mro(kind):
        if each is object:
            return False
        if name in members(each):
            return True
    return False


# --- values and containers -------------------------------------------------------------------------------------------


def number(x: Any) -> float | None:
    """Return a real number of Python or NumPy as a float; None for anything else."""
    kind = type(x)
    if issubclass(kind, float):
        return float.__float__(x)
    if issubclass(kind, int):
        return float(int.__int__(x))
    return float(x) if kind.__module__ == "numpy" and kind.__name__.startswith(("float", "int", "uint")) else None


def text(x: Any) -> str:
    """Return the name of a key or setting in the log, at most 120 characters; for other objects that of their class."""
    kind = type(x)
    if issubclass(kind, str):
        found = str.__str__(x)
    elif kind in _PRINTED:
        found = str(x)
    elif kind is tuple:
        found = f"({', '.join(map(text, x[:_MAX_PARTS]))})"
    else:
        found = kind.__name__
    return found if len(found) <= _MAX_NAME else f"{found[: _MAX_NAME - 1]}…"


def plain(x: Any, depth: int = 0) -> Any:
    """Return a setting as a JSON value: None, numbers and lists of them as such, anything else by :func:`text`.

    Never waits for a device: of tensors, only one number on the CPU is read; any other is ``tensor``.
    """
    if issubclass(type(x), bool) or x is None or type(x) in (int, float):
        return x
    if issubclass(type(x), Tensor):
        return float(x.detach()) if x.numel() == 1 and x.is_cpu else "tensor"
    if issubclass(type(x), (list, tuple)) and depth < _MAX_NEST:
        return [plain(v, depth + 1) for v in elements(x)[:_MAX_SETTINGS]]
    known = number(x)
    return text(x) if known is None else int(known) if issubclass(type(x), int) else known


def elements(x: Any) -> list[Any]:
    """Return the elements of a list or tuple, also of a derived class; none for anything else."""
    kind = type(x)
    if issubclass(kind, list):
        return list(list.__iter__(x))
    return list(tuple.__iter__(x)) if issubclass(kind, tuple) else []


def entries(x: Any) -> dict[Any, Any] | None:
    """Return the dictionary behind a mapping: a dict itself, or the content of a ``UserDict``; else None."""
    kind = type(x)
    if issubclass(kind, dict):
        return cast("dict[Any, Any]", x)
    return entries(dict.get(own(x), "data")) if issubclass(kind, UserDict) else None


def items(x: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the entries of a dictionary, list, tuple or dataclass by name; an iterator, say, yields nothing."""
    kind = type(x)
    pairs: Iterable[tuple[str, Any]]
    if (found := entries(x)) is not None:
        pairs = ((text(key), value) for key, value in dict.items(found))
    elif issubclass(kind, (list, tuple)):
        fields = of_class(x, "_fields") if kind is not tuple and kind is not list else None
        names = itertools.chain(map(text, elements(fields)), itertools.count(len(elements(fields))))
        pairs = ((str(name), value) for name, value in zip(names, elements(x), strict=False))
    elif type(fields := of_class(x, "__dataclass_fields__")) is dict:
        pairs = ((text(name), attribute(x, name)) for name in fields)
    else:
        return iter(())
    return itertools.islice(pairs, _MAX_ENTRIES)


def tensors(x: Any) -> list[Tensor]:
    """Return a tensor, or the tensors in a list, tuple or dictionary; none of an iterator, which would be used up."""
    if issubclass(type(x), Tensor):
        return [x]
    if type(x) is list and TENSORS.issuperset(map(type, x)):  # a group's parameters, in every step
        return list(x)
    found = entries(x)
    return [v for v in (elements(x) if found is None else dict.values(found)) if issubclass(type(v), Tensor)]


class ByIdentity(Generic[K, V]):
    """A mapping from living objects to values that runs no ``__hash__`` or ``__eq__`` of theirs."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[K], V]] = {}

    def get(self, key: K) -> V | None:
        found = self._found.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def put(self, key: K, value: V) -> V:
        """Set and return the value of an object."""
        self._found[id(key)] = weakref.ref(key), value
        return value

    def put_if_room(self, key: K, value: V, most: int) -> None:
        """Set the value of an object unless ``most`` objects that are alive have one."""
        if len(self) >= most:
            self.tidy()
        if len(self) < most:
            self.put(key, value)

    def drop(self, key: K) -> None:
        self._found.pop(id(key), None)

    def clear(self) -> None:
        self._found.clear()

    def tidy(self) -> None:
        """Remove the values of objects that are gone."""
        self._found = {k: found for k, found in self._found.items() if found[0]() is not None}

    def __len__(self) -> int:
        """Return the number of values, those of objects that are gone included."""
        return len(self._found)

    def keys(self) -> list[K]:
        """Return the objects that have a value and are alive."""
        return [key for ref, _ in self._found.values() if (key := ref()) is not None]


# --- modules ---------------------------------------------------------------------------------------------------------


def held(module: nn.Module, kind: str) -> dict[str, Any]:
    """Return a module's ``_modules``, ``_parameters`` or ``_buffers`` as a Python dictionary."""
    found = dict.get(module_dict(module), kind)
    if type(found) in _DICTIONARIES:
        return cast("dict[str, Any]", found)
    if issubclass(type(found), dict):
        return dict(dict.items(cast("dict[str, Any]", found)))
    # Scripted modules have containers of torch's own.
    return dict(found.items()) if type(found).__module__.startswith("torch.") else {}  # type: ignore[union-attr]


def modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules of ``module.modules()``, in its order, several times as fast."""
    return list(_parts(module))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    found: set[int] = set()
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found.add(id(part))
            yield part
            children: Any = dict.get(module_dict(part), "_modules")
            if type(children) not in _DICTIONARIES:
                children = held(part, "_modules")
            if children:
                waiting += [m for m in reversed(children.values()) if issubclass(type(m), nn.Module)]


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the items of ``module.named_modules()``, in its order."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = name, part
            children = reversed(held(part, "_modules").items())
            waiting += [(f"{name}.{k}" if name else k, m) for k, m in children if issubclass(type(m), nn.Module)]
    return list(found.values())


def is_training(module: nn.Module) -> bool:
    """Return ``module.training``; for a compiled model that of the model inside."""
    while (
        type(module).__name__ == "OptimizedModule" and (inner := held(module, "_modules").get("_orig_mod")) is not None
    ):
        module = inner
    return dict.get(module_dict(module), "training") is not False


def parameter(module: nn.Module, name: tuple[str, ...]) -> Tensor | None:
    """Return ``module.get_parameter(".".join(name))``; None if there is none, or a container is not Python's."""
    found: Any = module
    for part in name[:-1]:
        children: Any = dict.get(module_dict(found), "_modules")
        found = dict.get(children, part) if type(children) in _DICTIONARIES else None
        if not issubclass(type(found), nn.Module):
            return None
    own: Any = dict.get(module_dict(found), "_parameters")
    return dict.get(own, name[-1]) if type(own) in _DICTIONARIES else None


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    found: set[int] = set()
    for prefix, part in named_modules(module):
        for name, x in held(part, kind).items():
            if issubclass(type(x), Tensor) and id(x) not in found:
                found.add(id(x))
                yield f"{prefix}.{name}" if prefix else name, x


def _tensors(module: nn.Module, kind: str) -> Iterator[Tensor]:
    """Iterate over the tensors of one kind lazily, module by module: some callers need only the first one."""
    found: set[int] = set()
    for part in _parts(module):
        tensors: Any = dict.get(module_dict(part), kind)
        if type(tensors) not in _DICTIONARIES:
            tensors = held(part, kind)
        for x in tensors.values():
            if issubclass(type(x), Tensor) and id(x) not in found:
                found.add(id(x))
                yield x


#: Iterate like the methods of a module with these names.
named_parameters = functools.partial(_named, kind="_parameters")
named_buffers = functools.partial(_named, kind="_buffers")
parameters = functools.partial(_tensors, kind="_parameters")
buffers = functools.partial(_tensors, kind="_buffers")
