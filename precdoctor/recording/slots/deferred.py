"""Numbers on a device that are read later, so that training does not wait for them (except in the guard)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from precdoctor.recording.kernels.outside_user_modes import apart_from_user_modes, modes_open
from precdoctor.recording.model import static, tensor_leaves

#: A number; a function that returns it and may wait for the device; None if it is unknown.
Deferred = float | Callable[[], float] | None


def read(value: Deferred) -> float | None:
    """Return the number; waits for the device if necessary (drain thread only)."""
    return value() if callable(value) else value


class _Waits(threading.local):
    """Time that this thread has waited for devices, in ns."""

    ns = 0


waits: Final = _Waits()


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; then nothing on the device may be read."""
    if not CUDA.get("_initialized", True):  # most often there is no GPU, and this is called several times a step
        return False
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


#: Namespace of ``torch.cuda``, in which torch notes whether it uses a GPU; read without a call several times a step.
CUDA: Final = vars(torch.cuda)


def defer(value: Any, *, by_drain: bool = False) -> Deferred:
    """Return a tensor's scalar, or a number, to be read later without a synchronisation now; None for anything else.

    None also for a tensor on a GPU while a CUDA graph is captured, which would record the copy.

    Args:
        value: a tensor of one element, on any device; or a number.
        by_drain: only the drain waits for it: its thread then sleeps instead of spinning, which leaves the CPU to
            training.
    """
    if not issubclass(type(value), torch.Tensor):
        return value if type(value) is float else static.number(value)
    if type(value) in tensor_leaves.EXACT and value.is_cpu and not modes_open():
        return float(value.detach())
    if tensor_leaves.is_wrapped(value) or value.is_meta or tensor_leaves.is_transformed(value):
        return None
    with apart_from_user_modes():
        if value.is_cpu:
            return float(value.detach())
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        numbers = deferred(value.detach().reshape(1), by_drain=by_drain)
    return lambda: float(numbers()[0])


class Arriving:
    """Reads the numbers of a vector on the host once its copy has arrived, and adds its wait to ``waits``."""

    __slots__ = ("_event", "_host")

    def __init__(self, event: torch.cuda.Event, host: torch.Tensor) -> None:
        self._event, self._host = event, host

    def has_arrived(self) -> bool:
        """Return whether a read would not wait."""
        return bool(self._event.query())

    def __call__(self) -> list[float]:
        if not self._event.query():
            began = time.perf_counter_ns()
            try:
                self._event.synchronize()
            finally:
                waits.ns += time.perf_counter_ns() - began
        return self._host.tolist()


def would_wait(numbers: Callable[[], list[float]]) -> bool:
    """Return whether reading the result of :func:`deferred` now would wait for a device."""
    return type(numbers) is Arriving and not numbers.has_arrived()


def deferred(x: torch.Tensor, *, by_drain: bool = True) -> Callable[[], list[float]]:
    """Return a function that reads the numbers of a vector later; ``by_drain`` as in :func:`defer`."""
    if x.is_cpu:
        values: list[float] = x.tolist()
        return lambda: values
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    host.copy_(x, non_blocking=True)
    if not x.is_cuda:
        return host.tolist
    event = torch.cuda.Event(blocking=by_drain)
    event.record(torch.cuda.current_stream(x.device))
    return Arriving(event, host)
