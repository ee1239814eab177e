"""Launching a Triton kernel that is compiled already, past Triton's Python: that takes 25 us to find out what is known.

How Triton calls its launcher differs by version, and so it is watched: the second launch of a kernel goes through
Triton, and if what arrives at the launcher is what this module can make by itself, later ones go there at once. Where
it is anything else (another Triton, a profiler's hooks), every launch goes through Triton, as the first two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from precdoctor.recording.process import attach

#: What a launcher is given in front of the kernel's arguments: the grid, the stream, the function, what is known of the
#: kernel, what a profiler is told, and the two hooks that tell it.
_GRID, _STREAM, _FUNCTION, _PACKED, _HOOKS, _FIRST = slice(0, 3), 3, 4, 5, slice(7, 9), 9
#: By torch itself, of a device: the address of its current stream.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Launcher = Callable[..., object]


class _Patience:
    """Says why the first steps take so long, once, where they do."""

    _SECONDS: Final = 5.0

    def __init__(self) -> None:
        self._spent, self._said = 0.0, False

    def spend(self, seconds: float) -> None:
        """The first launch of a kernel took so long: it was compiled, or read from Triton's cache."""
        self._spent += seconds
        if self._spent > self._SECONDS and not self._said:
            self._said = True
            attach.say("kernels are compiled for this GPU: the first steps are slow, but not those of later runs")


_patience = _Patience()


class _Compiled:
    """A kernel with its constants, on one device."""

    __slots__ = ("front", "kernel", "run", "tail")

    def __init__(self, kernel: Any) -> None:
        #: To be watched; null once it was, or where it cannot be.
        self.kernel = kernel
        #: The launcher, once it is known how to call it: behind the stream come ``front``, the arguments and ``tail``.
        self.run: Launcher | None = None
        self.front: tuple[Any, ...] = ()
        self.tail: tuple[Any, ...] = ()


class KernelFailedError(Exception):
    """A kernel is asked for that did not compile."""


class LightLaunch:
    """Launches of one kernel whose arguments are integers that are not compiled in.

    Args:
        jitted: the kernel, as ``triton.jit`` made it.
        options: of every launch, ``num_warps`` and the like.
    """

    def __init__(self, jitted: Any, options: dict[str, Any]) -> None:
        self._jitted, self._options = jitted, options
        self._known: dict[tuple[Any, ...], _Compiled] = {}
        #: Those that do not compile, and are not tried again.
        self._failed: set[tuple[Any, ...]] = set()
        #: Gradients arrive on a thread per device: one of them watches at a time.
        self._watching = threading.Lock()

    def __call__(self, programs: int, device: torch.device, arguments: tuple[int, ...], *constants: Any) -> None:
        """Launch it on the current stream.

        Args:
            programs: how many.
            device: the current one.
            arguments: of the kernel.
            constants: that are compiled in.

        Raises:
            KernelFailedError: it did not compile with these constants, as whatever Triton raised has told before.
        """
        key = (device.index, *constants)
        known = self._known.get(key)
        if known is None:
            if key in self._failed:
                raise KernelFailedError
            began = time.perf_counter()
            try:
                kernel = self._by_triton(programs, arguments, constants)
            except Exception as error:
                if not is_the_devices(error):
                    self._failed.add(key)
                raise
            _patience.spend(time.perf_counter() - began)
            watchable = kernel is not None and device.type == "cuda" and _raw_stream is not None
            self._known[key] = _Compiled(kernel if watchable else None)
        elif known.run is None or _raw_stream is None:
            if known.kernel is None or not self._watching.acquire(blocking=False):
                self._by_triton(programs, arguments, constants)
                return
            try:
                self._watch(known, programs, arguments, constants)
            finally:
                self._watching.release()
        else:
            try:
                known.run(programs, 1, 1, _raw_stream(device.index), *known.front, *arguments, *known.tail)
            except TypeError:  # it takes other arguments after all; nothing was launched
                known.run = known.kernel = None
                self._by_triton(programs, arguments, constants)

    def _by_triton(self, programs: int, arguments: tuple[int, ...], constants: tuple[Any, ...]) -> Any:
        return self._jitted[(programs,)](*arguments, *constants, **self._options)

    def _watch(self, known: _Compiled, programs: int, arguments: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        """Launch it through Triton, and see how."""
        kernel, known.kernel = known.kernel, None
        run: Any = getattr(kernel, "run", None)
        name = next((n for n in ("_run", "run") if n in vars(kernel)), None)
        if name is None or not callable(run):
            self._by_triton(programs, arguments, constants)
            return
        came: list[tuple[Any, ...]] = []

        def watch(*given: Any) -> object:
            came.append(given)
            return run(*given)

        setattr(kernel, name, watch)
        try:
            self._by_triton(programs, arguments, constants)
        finally:
            setattr(kernel, name, run)
        if len(came) != 1 or not _is_known(came[0], programs):
            return
        given = came[0]
        if given[_FIRST:] in {(*arguments, *constants), arguments}:
            known.front = given[_FUNCTION], given[_PACKED], None, None, None
            known.tail = given[_FIRST + len(arguments) :]
            known.run = run


def is_the_devices(error: Exception) -> bool:
    """Whether the device reports a full memory, or an error of a kernel that ran before: no kernel of ours has failed.

    An error of the training's arrives at whoever calls the device next; torch 2.8 and older have no class for it.
    """
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    if type(error) is not RuntimeError:
        return isinstance(error, kinds)
    # Triton hands on what the launch was told: of a kernel made for another GPU, too, which is the kernel's own.
    return str(error).startswith(("CUDA error", "Triton Error [CUDA]")) and "image" not in str(error)


def _is_known(given: tuple[Any, ...], programs: int) -> bool:
    """Whether a launcher was given what is expected in front of the kernel's arguments, and nobody listens."""
    if len(given) < _FIRST or given[_GRID] != (programs, 1, 1) or type(given[_STREAM]) is not int:
        return False
    return not any(hook is not None and getattr(hook, "calls", hook) for hook in given[_HOOKS])
