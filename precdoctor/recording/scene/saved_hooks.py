"""Whether hooks pack what autograd saves just now: checkpointing's, offloading's, the user's.

Reading such a tensor would call them. Newer torch can be asked; in torch 2.6, entries and exits are counted here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd


class _Depth(threading.local):  # as torch keeps them
    value = 0


def _counted() -> Callable[[], bool]:
    """Counts by wrapping the two functions that every context of hooks calls."""
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
#: Something while autograd packs what it saves in this thread with somebody's hooks; else false or null.
active: Callable[[], object] = functools.partial(_ask, True) if _ask is not None else _counted()
