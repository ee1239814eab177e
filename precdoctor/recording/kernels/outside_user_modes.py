"""Isolation of our ops from the torch modes that the user has switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

#: Returns the number of open dispatch modes, the user's and ours.
modes_open: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
#: Context manager for the user's code inside :data:`without_functions`: enables ``__torch_function__`` again.
with_functions: Any = getattr(torch._C, "_EnableTorchFunction", contextlib.nullcontext)
#: Context manager: call no ``__torch_function__`` of modes or subclasses.
without_functions: Any = (
    contextlib.nullcontext if with_functions is contextlib.nullcontext else torch._C.DisableTorchFunction
)


def _may_react(depth: int) -> bool:
    """Whether one of the ``depth`` open dispatch modes may react to our ops."""
    return depth > 1 or not getattr(torch._C._get_dispatch_stack_at(0), "ignores_ours", False)


def is_unwatched() -> bool:
    """Whether no open mode may react to our ops; False in inference mode."""
    depth = modes_open()
    if torch._C._len_torch_function_stack() or torch.is_inference_mode_enabled():
        return False
    return not (depth and _may_react(depth))


def only_estimates() -> bool:
    """Whether tensors have no values, under a ``FakeTensorMode``: then nothing trains. Call only if a mode is open."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class apart_from_user_modes:  # noqa: N801 - used like a function
    """Run our ops where no mode of the user can see, count or redirect them; without autograd and inference mode."""

    # A class, not a generator: it is entered for every tensor, and a generator's overhead would double its cost.
    __slots__ = ("_exits", "_had_grad", "_no_functions")
    #: Whether to shut out also the modes that ignore our ops.
    every = False

    def __enter__(self) -> None:
        self._exits: contextlib.ExitStack | None = None
        depth = modes_open()
        watched = depth and (self.every or _may_react(depth))
        if watched or torch.is_inference_mode_enabled():
            self._exits = contextlib.ExitStack()
            # Our banks outlive inference mode: created in it, they could not be written to later.
            if torch.is_inference_mode_enabled():
                self._exits.enter_context(torch.inference_mode(mode=False))
            if watched:
                from torch.utils._python_dispatch import _disable_current_modes

                self._exits.enter_context(_disable_current_modes())
        self._no_functions = torch._C.DisableTorchFunction()
        self._no_functions.__enter__()  # first: a function mode would see the change of grad mode
        self._had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch._C._set_grad_enabled(self._had_grad)
        self._no_functions.__exit__(None, None, None)
        if self._exits is not None:
            self._exits.close()


class apart_from_every_mode(apart_from_user_modes):  # noqa: N801 - used like a function
    """:class:`apart_from_user_modes` that shuts out our own modes also.

    A mode receives a bare number in place of a tensor that stands for one, as the 2 that autograd saves for ``2 * x``.
    """

    __slots__ = ()
    every = True


def detached(x: torch.Tensor) -> torch.Tensor:
    """Return ``x.detach()``, hidden from the user's modes."""
    with apart_from_user_modes():
        return x.detach()
