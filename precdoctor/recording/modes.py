"""Taking dispatch modes of ours off torch's stack."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def in_backward() -> bool:
    """Whether this thread runs part of a backward pass.

    When that ends, autograd puts the stack back as it was when it began, without holding the modes that were on it:
    what had been open before has to stay open until then, and alive.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def take_off(mode: TorchDispatchMode) -> None:
    """Close a mode, if it is open, also under modes that somebody has opened since and not closed."""
    depth = torch._C._len_torch_dispatch_stack()
    if not any(torch._C._get_dispatch_stack_at(i) is mode for i in range(depth)):
        return
    above: list[Any] = []
    while torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
