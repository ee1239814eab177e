"""Keeps device memory that a forked child inherits from being freed there: only the parent can use the device.

A forked child of a process that uses CUDA must not call CUDA: an error there ends it. But freeing memory does: the
allocator of pinned memory asks CUDA whether copies from it are done, and the device's allocator does if several streams
have read a tensor. A child that begins anew would free the tensors that hooks hold of the parent's step, batches of a
data loader among them. So it keeps all of them until it ends.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import os
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

_OWN: Final = __name__.partition(".")[0]
_CONTAINERS: Final = frozenset({
    dict, list, tuple, set, frozenset, collections.deque, functools.partial, types.CellType, types.MethodType,
    types.MappingProxyType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
})  # fmt: skip
#: Types that hold no device memory; most objects are of these.
_PLAIN: Final = frozenset({
    str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.CodeType, types.BuiltinFunctionType,
})  # fmt: skip


def keep(roots: Iterable[Any]) -> list[Any]:
    """Keep the objects reachable from ``roots`` from ever being freed, and return them.

    Follows containers and our own objects; objects of others are kept but not followed. Calls none of their code.
    """
    there = list(roots)
    found = {id(x): x for x in there}
    while there:
        for x in gc.get_referents(there.pop()):
            if type(x) not in _PLAIN and id(x) not in found:
                found[id(x)] = x
                if _is_followed(x):
                    there.append(x)
    kept = list(found.values())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # else the list is freed as the interpreter ends
    return kept


def _is_followed(x: Any) -> bool:
    kind = type(x)
    if kind in _CONTAINERS:
        return True
    if kind is types.FunctionType:
        return _is_own(x.__module__)
    of = x if issubclass(kind, type) else kind
    return _is_own(type.__getattribute__(of, "__dict__").get("__module__"))


def _is_own(module: Any) -> bool:
    return type(module) is str and module.partition(".")[0] == _OWN


def watch_forks() -> None:
    """In forked children of a process that uses CUDA, keep all that our modules reach.

    Call this once, before other fork handlers are registered: they drop references to the parent's step.
    """
    uses_cuda = False

    def before() -> None:
        nonlocal uses_cuda
        uses_cuda = torch.cuda.is_initialized()  # always False in a child

    def in_child() -> None:
        if uses_cuda:
            keep([vars(module) for name, module in list(sys.modules.items()) if _is_own(name)])

    os.register_at_fork(before=before, after_in_child=in_child)
