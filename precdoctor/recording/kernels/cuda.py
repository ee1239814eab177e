"""Use of the Triton kernels if they work here, which the first CUDA tensor shows; the package does not need Triton."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.recording.kernels import batched, light_launch
from precdoctor.recording.kernels.light_launch import KernelFailedError, is_device_error
from precdoctor.recording.kernels.tiling import is_dense
from precdoctor.recording.process import attach

#: One sentence for each kernel that failed; and how many of them :func:`untold_failures` has returned.
_failures: list[str] = []
_reported = 0
#: After so many failed kernels the cause is not the kernel, and no other one is tried.
_MOST_FAILURES: Final = 3
#: Per thread, whether :func:`stay_out_of_captures` has run; and CUDA's code of the capture mode that it sets.
_thread = threading.local()
_RELAXED: Final = 2
#: Bit mask: blocks of every size, and a fingerprint.
_ALL: Final = 15


def measure(x: Tensor, ints: int, floats: int, counter: int, want: int) -> bool:
    """:func:`precdoctor.recording.kernels.reference.measure` by the Triton kernel.

    Returns False, with nothing measured, if that is impossible. A kernel that does not compile is not tried again in
    this process; after three such kernels none is.

    Args:
        x: on a CUDA device.
        ints, floats, counter: addresses on that device.
        want: blocks and fingerprint, as a bit mask.
    """
    kernel = _kernel()
    if kernel is None or gave_up() or not kernel.supports(x, want):
        return False
    return _tried(x.device, kernel.measure_at, x, ints, floats, counter, want)


def takes(x: Tensor, before: Tensor | None, intended: Tensor | None) -> bool:
    """Whether :func:`measure_many` accepts a tensor, or an update of it.

    Not while a CUDA graph is captured, because every replay would read the table again. For an update all three tensors
    must have the same layout in memory, and the weight at most 32 bits.
    """
    kernel = _kernel() if x.is_cuda else None
    if kernel is None or gave_up() or torch.cuda.is_current_stream_capturing():
        return False
    if not kernel.supports(x, _ALL):
        return False
    return before is None or intended is None or updates_fit(before, x, intended)


def updates_fit(before: Tensor, after: Tensor, intended: Tensor) -> bool:
    """Whether the batched kernel can compare these three tensors."""
    return (
        before.dtype == after.dtype != torch.float64
        and intended.dtype in {torch.float32, torch.float64}
        and before.device == after.device == intended.device
        and before.stride() == after.stride() == intended.stride()
        and (before.is_contiguous() or is_dense(before.shape, before.stride()))
    )


def measure_many(group: batched.Group, members: Sequence[batched.Member], table: batched.Table, to: Tensor) -> bool:
    """Measure the tensors of a group in one launch (two if slots are restarted).

    Returns False, with nothing measured, if that is impossible. ``to``: the launch counter of the device.
    """

    def launch() -> None:
        from precdoctor.recording.kernels import triton_batch

        table.describe(members)
        triton_batch.launch(group, table, to)

    if gave_up():
        return False
    _wait_for_streams([member.job for member in members], group)
    return _tried(group.device, launch)


def looks_at(dtypes: Collection[torch.dtype], device: torch.device) -> bool:
    """Whether :func:`look` can read tensors of these dtypes."""
    kernel = _kernel() if device.type == "cuda" else None
    if kernel is None or gave_up():
        return False
    return all(dtype in kernel.FORMATS and dtype.itemsize <= 4 for dtype in dtypes)


def look(
    device: torch.device, programs: int, addresses: tuple[int, ...], chunk: int, dtype: torch.dtype, *, aligned: bool
) -> bool:
    """Run ``triton_look.launch``. Return False, with nothing launched, if that is impossible."""

    def launch() -> None:
        from precdoctor.recording.kernels import triton_look

        triton_look.launch(device, programs, addresses, chunk, dtype, aligned=aligned)

    return not gave_up() and _tried(device, launch)


def stream_of(x: Tensor) -> int:
    """Return the current stream of a tensor's device; 0 on the CPU."""
    return current_stream(x.device) if x.is_cuda else 0


def current_stream(device: torch.device) -> int:
    """Return CUDA's handle of a GPU's current stream; creating torch's stream object would take as long as a launch."""
    return light_launch.raw_stream(device.index)


def stream_object(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Return the torch object of a stream handle."""
    return torch.cuda.ExternalStream(stream, device=device)


def stay_out_of_captures() -> None:
    """Let this thread query whether a copy has arrived while another thread captures a CUDA graph.

    Such a query on any thread makes the capture fail, unless the thread has declared that it takes no part in captures.
    PyTorch's NCCL watchdog does the same (``CUDAStreamCaptureModeGuard``).
    """
    if getattr(_thread, "said", False) or not torch.cuda.is_initialized():
        return
    _thread.said = True
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def _wait_for_streams(jobs: Sequence[batched.Job], group: batched.Group) -> None:
    """Make the launch wait, on the device, for the other streams on which tensors were computed."""
    for stream in {job.stream for job in jobs if job.stream != group.stream}:
        here = torch.cuda.current_stream(group.device)
        here.wait_stream(stream_object(group.device, stream))
        for job in jobs:
            if job.stream == stream:
                for x in (job.x, job.before, job.intended):
                    if x is not None:
                        x.record_stream(here)


def _tried(device: torch.device, body: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Run ``body`` on a device. Return False and note the failure if its kernel cannot run; raise device errors."""
    try:
        with _on(device):
            body(*args, **options)
    except KernelFailedError:
        return False
    except Exception as error:  # compiling needs a driver, a C compiler and a cache; any may be missing
        attach.let_through(error)
        if is_device_error(error):
            raise
        _failures.append(f"Triton failed: {type(error).__name__}: {error}".partition("\n")[0])
        return False
    return True


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def gave_up() -> bool:
    """Whether so many kernels have failed that no other one is tried."""
    return len(_failures) >= _MOST_FAILURES


def failure() -> str | None:
    """Why a Triton kernel is not used, as one sentence; None if all are."""
    if _kernel() is None:
        return "Triton is not installed"
    return _failures[0] if _failures else None


def untold_failures() -> list[str]:
    """Return the failures since the last call, as sentences for people."""
    global _reported
    if len(_failures) == _reported:
        return []
    found, _reported = _failures[_reported:], len(_failures)
    what = "tensors are" if gave_up() else "some tensors are"
    return [f"{what} measured by torch's operations, which is slow: {why}" for why in found]


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from precdoctor.recording.kernels import triton_kernel
    except ImportError:
        return None
    return triton_kernel
