"""Keeping what the user has switched on in torch away from our ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

#: How many dispatch modes are open, the user's and ours.
modes_open: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
#: Has the user's ``__torch_function__``, of modes and of subclasses, called again inside :data:`without_functions`: for
#: code of the user's that is run again.
with_functions: Any = getattr(torch._C, "_EnableTorchFunction", contextlib.nullcontext)
#: Has none of them called, whatever is asked of a tensor.
without_functions: Any = (
    contextlib.nullcontext if with_functions is contextlib.nullcontext else torch._C.DisableTorchFunction
)


def _does_more_than_look(depth: int) -> bool:
    """Whether one of the dispatch modes that are open, ``depth`` of them, may do something about our ops."""
    return depth > 1 or not getattr(torch._C._get_dispatch_stack_at(0), "ignores_ours", False)


def is_unwatched() -> bool:
    """Whether there is no such mode."""
    depth = modes_open()
    if torch._C._len_torch_function_stack() or torch.is_inference_mode_enabled():
        return False
    return not (depth and _does_more_than_look(depth))


def only_estimates() -> bool:
    """Whether tensors have no values, under a ``FakeTensorMode``: that is no training. Asked where a mode is open."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class apart_from_user_modes:  # noqa: N801 - used like a function
    """Run our ops where no mode of the user's can see, count or redirect them."""

    # A class, not a generator: this is entered for every tensor, and a generator's bookkeeping costs as much again.
    __slots__ = ("_had_grad", "_no_functions", "_rare")
    #: Also where no mode can see our ops that only looks.
    every = False

    def __enter__(self) -> None:
        self._rare: contextlib.ExitStack | None = None
        depth = modes_open()
        watched = depth and (self.every or _does_more_than_look(depth))
        if watched or torch.is_inference_mode_enabled():
            self._rare = contextlib.ExitStack()
            if (
                torch.is_inference_mode_enabled()
            ):  # our banks outlive it: made there, they could not be written to later
                self._rare.enter_context(torch.inference_mode(mode=False))
            if watched:
                from torch.utils._python_dispatch import _disable_current_modes

                self._rare.enter_context(_disable_current_modes())
        self._no_functions = torch._C.DisableTorchFunction()
        self._no_functions.__enter__()  # first: a mode for functions sees grad mode change
        self._had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch._C._set_grad_enabled(self._had_grad)
        self._no_functions.__exit__(None, None, None)
        if self._rare is not None:
            self._rare.close()


class apart_from_every_mode(apart_from_user_modes):  # noqa: N801 - the same
    """As :class:`apart_from_user_modes`, and where no mode of ours can see them.

    A mode is given a bare number in place of a tensor that stands for one, as the 2 that autograd saves of ``2 * x``.
    """

    __slots__ = ()
    every = True


def detached(x: torch.Tensor) -> torch.Tensor:
    """``x.detach()``, which no mode of the user's sees; called where one is open."""
    with apart_from_user_modes():
        return x.detach()
