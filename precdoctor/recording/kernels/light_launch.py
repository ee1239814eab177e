"""Launches of compiled Triton kernels that bypass Triton's Python, which takes 25 us per launch to find the kernel.

How Triton calls its launcher differs by version, and so it is observed: the second launch of a kernel goes through
Triton, and if this module can build the launcher's arguments by itself, later launches call the launcher directly.
Otherwise (another Triton, a profiler's hooks), every launch goes through Triton, like the first two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from precdoctor.recording.process import attach

#: Positions of a launcher's arguments before those of the kernel: the grid, the stream, the function, the kernel's
#: packed metadata, data for a profiler, and the two hooks that a profiler sets.
_GRID, _STREAM, _FUNCTION, _PACKED, _HOOKS, _FIRST = slice(0, 3), 3, 4, 5, slice(7, 9), 9
#: Torch's function that returns the handle of a device's current stream. A torch without CUDA has none.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)

Launcher = Callable[..., object]


class _SlowStartNotice:
    """Prints once that compiling makes the first steps slow, if it takes long."""

    _SECONDS: Final = 5.0

    def __init__(self) -> None:
        self._spent, self._said = 0.0, False

    def spend(self, seconds: float) -> None:
        """Add the duration of a kernel's first launch, in which it was compiled or read from Triton's cache."""
        self._spent += seconds
        if self._spent > self._SECONDS and not self._said:
            self._said = True
            attach.say("kernels are compiled for this GPU: the first steps are slow, but not those of later runs")


_slow_start = _SlowStartNotice()


@dataclass(slots=True, eq=False)
class _Compiled:
    #: The kernel until a launch of it was observed; None afterwards, or if it cannot be observed.
    kernel: Any
    #: The launcher, once its arguments are known: after the stream ``front``, the kernel's arguments, ``tail``.
    run: Launcher | None = None
    front: tuple[Any, ...] = ()
    tail: tuple[Any, ...] = ()


class KernelFailedError(Exception):
    """A launch was requested of a kernel that had failed to compile before."""


class LightLaunch:
    """Launches of one kernel whose arguments are integers that are not compiled in.

    Args:
        jitted: the kernel, as ``triton.jit`` returned it.
        options: of every launch, ``num_warps`` and the like.
    """

    def __init__(self, jitted: Any, options: dict[str, Any]) -> None:
        self._jitted, self._options = jitted, options
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}
        #: Keys of kernels that did not compile and are not tried again.
        self._failed: set[tuple[Any, ...]] = set()
        #: Gradients arrive on one thread per device: only one of them observes a launch at a time.
        self._observing = threading.Lock()

    def __call__(self, programs: int, device: torch.device, arguments: tuple[int, ...], *constants: Any) -> None:
        """Launch the kernel on the current stream.

        Args:
            programs: number of programs.
            device: the current one.
            constants: arguments that are compiled in.

        Raises:
            KernelFailedError: the kernel did not compile with these constants before; then Triton's error was raised.
        """
        key = (device.index, *constants)
        entry = self._compiled.get(key)
        if entry is None:
            if key in self._failed:
                raise KernelFailedError
            began = time.perf_counter()
            try:
                kernel = self._by_triton(programs, arguments, constants)
            except Exception as error:
                if not is_device_error(error):
                    self._failed.add(key)
                raise
            _slow_start.spend(time.perf_counter() - began)
            self._compiled[key] = _Compiled(kernel if device.type == "cuda" else None)
        elif entry.run is None:
            if entry.kernel is None or not self._observing.acquire(blocking=False):
                self._by_triton(programs, arguments, constants)
                return
            try:
                self._observe(entry, programs, arguments, constants)
            finally:
                self._observing.release()
        else:
            try:
                entry.run(programs, 1, 1, raw_stream(device.index), *entry.front, *arguments, *entry.tail)
            except TypeError:  # the launcher takes other arguments after all; nothing was launched
                entry.run = entry.kernel = None
                self._by_triton(programs, arguments, constants)

    def _by_triton(self, programs: int, arguments: tuple[int, ...], constants: tuple[Any, ...]) -> Any:
        return self._jitted[(programs,)](*arguments, *constants, **self._options)

    def _observe(self, entry: _Compiled, programs: int, arguments: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        """Launch the kernel through Triton, and record the arguments that its launcher receives."""
        kernel, entry.kernel = entry.kernel, None
        run: Any = getattr(kernel, "run", None)
        name = next((n for n in ("_run", "run") if n in vars(kernel)), None)
        if name is None or not callable(run):
            self._by_triton(programs, arguments, constants)
            return
        calls: list[tuple[Any, ...]] = []

        def watch(*given: Any) -> object:
            calls.append(given)
            return run(*given)

        setattr(kernel, name, watch)
        try:
            self._by_triton(programs, arguments, constants)
        finally:
            setattr(kernel, name, run)
        if len(calls) != 1 or not _has_expected_arguments(calls[0], programs):
            return
        given = calls[0]
        if given[_FIRST:] in {(*arguments, *constants), arguments}:
            entry.front = given[_FUNCTION], given[_PACKED], None, None, None
            entry.tail = given[_FIRST + len(arguments) :]
            entry.run = run


def is_device_error(error: Exception) -> bool:
    """Whether the device reports out of memory or an error of an earlier kernel: then no kernel of ours has failed.

    An error of the training's kernels surfaces at the device's next caller; torch up to 2.8 has no class for it.
    """
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    if type(error) is not RuntimeError:
        return isinstance(error, kinds)
    # Triton passes on the launch's error. One that names an image (a kernel for another GPU) is the kernel's own.
    return str(error).startswith(("CUDA error", "Triton Error [CUDA]")) and "image" not in str(error)


def _has_expected_arguments(given: tuple[Any, ...], programs: int) -> bool:
    """Whether a launcher's leading arguments are as expected, and no hook is set."""
    if len(given) < _FIRST or given[_GRID] != (programs, 1, 1) or type(given[_STREAM]) is not int:
        return False
    return not any(hook is not None and getattr(hook, "calls", hook) for hook in given[_HOOKS])
