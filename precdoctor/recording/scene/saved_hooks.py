"""Whether saved-tensor hooks are active: those of checkpointing, of offloading, of the user.

Reading a saved tensor would call them. Newer torch can be asked; for torch 2.6, entries and exits are counted here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd


class _Depth(threading.local):  # per thread, as torch's stack of hooks
    value = 0


def _counted() -> Callable[[], bool]:
    """Wrap the two functions that push and pop hooks; return a function that returns whether any are pushed."""
    depth = _Depth()
    push, pop = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks

    def pushed(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        push(pack, unpack)
        if not torch.compiler.is_compiling():
            depth.value += 1

    def popped() -> None:
        pop()
        if not torch.compiler.is_compiling():
            depth.value -= 1

    _autograd._push_saved_tensors_default_hooks = pushed
    _autograd._pop_saved_tensors_default_hooks = popped
    return lambda: depth.value > 0


_ask = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
#: Returns something truthy while saved-tensor hooks are active in this thread; otherwise False or None.
active: Callable[[], object] = functools.partial(_ask, True) if _ask is not None else _counted()
