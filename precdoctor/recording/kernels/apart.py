"""Keeping what the user has switched on in torch away from our ops."""

from __future__ import annotations

import contextlib

import torch


def _are_watched() -> bool:
    """Whether a dispatch mode is open that may do something about our ops."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 1 or (depth == 1 and not getattr(torch._C._get_dispatch_stack_at(0), "only_looks", False))


def is_unwatched() -> bool:
    """Whether there is no such mode."""
    modes = _are_watched() or torch._C._len_torch_function_stack()
    return not (modes or torch.is_inference_mode_enabled())


class apart_from_user_modes:  # noqa: N801 - used like a function
    """Run our ops where no mode of the user's can see, count or redirect them."""

    # A class, not a generator: this is entered for every tensor, and a generator's bookkeeping costs as much again.
    __slots__ = ("_had_grad", "_no_functions", "_rare")

    def __enter__(self) -> None:
        self._rare: contextlib.ExitStack | None = None
        if torch.is_inference_mode_enabled() or _are_watched():
            self._rare = contextlib.ExitStack()
            if (
                torch.is_inference_mode_enabled()
            ):  # our banks outlive it: made there, they could not be written to later
                self._rare.enter_context(torch.inference_mode(mode=False))
            if _are_watched():
                from torch.utils._python_dispatch import _disable_current_modes

                self._rare.enter_context(_disable_current_modes())
        self._had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._no_functions = torch._C.DisableTorchFunction()
        self._no_functions.__enter__()

    def __exit__(self, *_error: object) -> None:
        self._no_functions.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._had_grad)
        if self._rare is not None:
            self._rare.close()
