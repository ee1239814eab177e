"""What a forked child inherits and must not free: memory of a device that only its parent can speak to.

A child of a process that uses CUDA cannot use it, and an error there ends the process. Freeing is using: the allocator
of pinned memory asks CUDA whether copies from it are done, and so does that of the device, where several streams have
read a tensor. A child that begins anew would free what hooks remember of the parent's step, batches of a data loader
among them: it keeps all of that until it ends.
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
#: What holds no memory of a device, and is most of what there is.
_PLAIN: Final = frozenset({
    str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.CodeType, types.BuiltinFunctionType,
})  # fmt: skip


def keep(roots: Iterable[Any]) -> list[Any]:
    """Never free what these reach through containers and objects of ours.

    Strangers' objects are kept and not looked into. Nothing of theirs is called.

    Returns:
        What is kept.
    """
    there = list(roots)
    found = {id(x): x for x in there}
    while there:
        for x in gc.get_referents(there.pop()):
            if type(x) not in _PLAIN and id(x) not in found:
                found[id(x)] = x
                if _is_looked_into(x):
                    there.append(x)
    kept = list(found.values())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # else it would go as the interpreter ends
    return kept


def _is_looked_into(x: Any) -> bool:
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
    """Keep, in every forked child of a process that uses CUDA, what all our modules reach; to be called once, first."""
    uses_cuda = False

    def before() -> None:
        nonlocal uses_cuda
        uses_cuda = torch.cuda.is_initialized()  # which a child could not find out

    def in_child() -> None:
        if uses_cuda:
            keep([vars(module) for name, module in list(sys.modules.items()) if _is_own(name)])

    os.register_at_fork(before=before, after_in_child=in_child)
