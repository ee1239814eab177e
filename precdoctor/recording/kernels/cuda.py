"""Whether the Triton kernel can be used here, found out at the first CUDA tensor; the package does not need Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from precdoctor.recording import attach

_failure: list[str] = []


def measure(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> bool:
    """:func:`precdoctor.recording.kernels.reference.measure` by the Triton kernel; false, and nothing measured, where
    that cannot be. A kernel that does not compile is not tried again in this process.
    """
    kernel = _kernel()
    if kernel is None or _failure or not kernel.supports(x):
        return False
    try:
        if x.device.index == torch.cuda.current_device():
            kernel.measure(x, ints, floats, counter, blocks)
        else:
            with torch.cuda.device(x.device):
                kernel.measure(x, ints, floats, counter, blocks)
    except Exception as error:  # noqa: BLE001 - compiling needs a driver, a C compiler and a cache; any may be missing
        attach.let_through(error)
        _failure.append(f"Triton failed: {type(error).__name__}: {error}".partition("\n")[0])
        return False
    return True


def failure() -> str | None:
    """Why the Triton kernel is not used; null when it is."""
    if _kernel() is None:
        return "Triton is not installed"
    return _failure[0] if _failure else None


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from precdoctor.recording.kernels import triton_kernel
    except ImportError:
        return None
    return triton_kernel
