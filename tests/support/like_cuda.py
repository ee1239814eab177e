"""A CPU that refuses what CUDA refuses: for code of the recorder, and for it alone, tensors are on ``cuda:0``.

The recorder asks a tensor for its device, makes others there, launches, copies to pinned memory, records events: all
that goes on, on the CPU. What CUDA lacks raises, and so does what would make the training thread wait: reading a tensor
that is on the device, a copy from it to memory that is not pinned, an event beyond the first one of a step. While
``CUDA.capturing`` is set, pinned memory, events and copies from the host raise, too. Replays, scans and shadows may
wait; so may the drain.

``install()`` is for a process of its own: it patches torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import precdoctor

OURS = str(Path(precdoctor.__file__).parent / "recording") + "/"
#: The one place that waits on every step, and is counted for it.
GUARD = "microscope/guard.py"
#: Rooms that run a step again, or look at each of its ops.
MAY_WAIT = ("microscope/", "deepscan/", "shadowing/", "loss_replay", "fp8/provenance")
#: Functions of the recorder that are only called when something is wrong already, or wait as documented.
INCIDENTS = {
    "_examine", "_finite_before", "_report_optimizer", "_report_state", "_tell_if_sure", "_is_finite", "_is_lost",
    "is_stuck", "_is_rounded", "_added_up",
}  # fmt: skip
#: Functions of the recorder that stand for one of torch's: they run the user's calls.
WRAPPERS = {"noticing"}
_DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_BASE = torch._C.TensorBase
_device_of = _BASE.device.__get__
_true_is_cpu = _BASE.is_cpu.__get__


class Refused(RuntimeError):
    """CUDA would not do that, or would wait."""


class Events:
    """What the emulated device has done, for a test to count."""

    def __init__(self) -> None:
        self.capturing = False
        #: Waits of the training thread, by step.
        self.waits: dict[int, int] = {}
        self.pinned = 0
        self.copies = 0
        self.refusals: list[str] = []
        #: The current stream, and which has waited for which.
        self.stream = 0
        self.followed: list[tuple[int, int]] = []
        #: What ``mem_get_info`` and its kin give, in bytes.
        self.free, self.total, self.allocated, self.peak = 100 << 30, 140 << 30, 0, 0
        self.step = lambda: 0
        self._numbers = itertools.count(1)
        self._waited_for = 0
        #: Storages on the host, alive as long as they are in here.
        self.host: dict[int, object] = {}

    def refuse(self, what: str) -> None:
        self.refusals.append(what)
        raise Refused(f"on a CUDA device: {what}")


CUDA = Events()
_FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRAINING = threading.get_ident()


def _is_ours(frame) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _caller():
    """Who has called the function that asks, past the recorder's wrappers of torch's functions."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in WRAPPERS and _is_ours(frame):
        frame = frame.f_back
    return frame


def _may_wait(frame) -> bool:
    """Whether a replay, a scan or an incident is under way, or the thread is another one."""
    if threading.current_thread().name == "precdoctor-drain":
        return True
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            name = code.co_filename[len(OURS) :]
            if (name.startswith(MAY_WAIT) and name != GUARD) or code.co_name in INCIDENTS or code.co_name == "close":
                return True
        frame = frame.f_back
    return False


def on_device(x) -> bool:
    """Whether the recorder takes this CPU tensor for one on the device."""
    if not issubclass(type(x), Tensor) or not _true_is_cpu(x):
        return False
    try:
        return x.untyped_storage()._cdata not in CUDA.host
    except (RuntimeError, ValueError):  # sparse, or without memory so far
        return True


def to_host(x: Tensor) -> Tensor:
    """Note that a tensor's memory is the host's."""
    storage = x.untyped_storage()
    CUDA.host[storage._cdata] = storage
    return x


# --- tensors ---------------------------------------------------------------------------------------------------------


def _attribute(name, there):
    """An attribute that tells the recorder about the device, and everybody else the truth."""
    true = getattr(_BASE, name).__get__

    def get(x):
        if _is_ours(_caller()) and on_device(x):
            return there
        return true(x)

    return property(get)


def _waits(owner, name, what=None):
    """A function that hands values of a tensor to the host."""
    true = getattr(owner, name)

    @functools.wraps(true)
    def call(*args, **kwargs):
        frame = _caller()
        if _is_ours(frame) and any(map(on_device, args)) and not _may_wait(frame):
            CUDA.refuse(f"{what or name} waits for the device ({_place(frame)})")
        return true(*args, **kwargs)

    return call


def _lacks(owner, name, when):
    """A function that CUDA does not have for some tensors."""
    true = getattr(owner, name)

    @functools.wraps(true)
    def call(*args, **kwargs):
        frame = _caller()
        if _is_ours(frame) and on_device(args[0]) and when(args[0]):
            CUDA.refuse(f"{name} is not implemented for {args[0].dtype} ({_place(frame)})")
        return true(*args, **kwargs)

    return call


def _place(frame) -> str:
    return f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno}"


def _getitem(true):
    def get(x, index):
        frame = _caller()
        mask = issubclass(type(index), Tensor) and index.dtype in (torch.bool, torch.uint8)
        if mask and _is_ours(frame) and on_device(x) and not _may_wait(frame):
            CUDA.refuse(f"a mask as an index waits for the device ({_place(frame)})")
        return true(x, index)

    return get


def _copy(true):
    def copy_(x, source, *args, **kwargs):
        frame = _caller()
        if _is_ours(frame) and not on_device(x) and on_device(source) and not _may_wait(frame):
            if not (kwargs.get("non_blocking") or (args and args[0])):
                CUDA.refuse(f"a copy to the host waits for the device ({_place(frame)})")
            if CUDA.capturing:
                CUDA.refuse(f"a copy to the host while a graph is captured ({_place(frame)})")
            CUDA.copies += 1
        return true(x, source, *args, **kwargs)

    return copy_


def _moved(true):
    def to(x, *args, **kwargs):
        frame = _caller()
        if not _is_ours(frame):
            return true(x, *args, **kwargs)
        given = next((a for a in (*args, kwargs.get("device")) if isinstance(a, (torch.device, str))), None)
        if given is None:
            return true(x, *args, **kwargs)
        goes_there = torch.device(given).type == "cuda"
        if goes_there and CUDA.capturing and not on_device(x):
            CUDA.refuse(f"a copy to the device waits while a graph is captured ({_place(frame)})")
        args = [_CPU if isinstance(a, (torch.device, str)) else a for a in args]
        kwargs.pop("device", None)
        if not goes_there and on_device(x):
            if not _may_wait(frame):
                CUDA.refuse(f"to('cpu') waits for the device ({_place(frame)})")
            return to_host(true(x, *args, **{**kwargs, "copy": True}))
        return true(x, *args, **({**kwargs, "copy": True} if goes_there and not on_device(x) else kwargs))

    return to


def _made(true, *, like=False):
    """A function that makes a tensor of nothing."""

    @functools.wraps(true)
    def make(*args, **kwargs):
        frame = _caller()
        if not _is_ours(frame):
            return true(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            if CUDA.capturing:
                CUDA.refuse(f"pinned memory while a graph is captured ({_place(frame)})")
            CUDA.pinned += 1
            return to_host(true(*args, **{**kwargs, "device": _CPU}))
        device = kwargs.get("device")
        if device is None:
            return true(*args, **kwargs) if like else to_host(true(*args, **kwargs))
        there = torch.device(device).type == "cuda"
        made = true(*args, **{**kwargs, "device": _CPU} if there else kwargs)
        return made if there or made.is_meta else to_host(made)

    return make


def _reads_to_host(true):
    def call(*args, **kwargs):
        return to_host(true(*args, **kwargs))

    return call


# --- torch.cuda ------------------------------------------------------------------------------------------------------


class Stream:
    """One of the device's; ``CUDA.stream`` is the current one."""

    def __init__(self, number: int = 0) -> None:
        self.cuda_stream = number

    def __eq__(self, other) -> bool:
        return self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other) -> None:
        """There is nothing to wait for."""
        CUDA.followed.append((self.cuda_stream, other.cuda_stream))

    def wait_event(self, event) -> None:
        """There is nothing to wait for."""
        CUDA.followed.append((self.cuda_stream, event.stream))


class Event:
    """Counts what the training thread waits for; the drain's are to give the processor away meanwhile."""

    def __init__(self, *, blocking: bool = False, **_: object) -> None:
        if CUDA.capturing:
            CUDA.refuse("an event while a graph is captured")
        frame = sys._getframe(2)
        #: The guard spins on what it waits for.
        self.blocking = blocking or frame.f_code.co_filename == OURS + "steps/sentinel.py"
        self._number = 0

    def record(self, stream=None) -> None:
        if CUDA.capturing:
            CUDA.refuse("an event while a graph is captured")
        self.stream = CUDA.stream if stream is None else stream.cuda_stream
        self._number = next(CUDA._numbers)

    def query(self) -> bool:
        """Whether the device has got there: the training's threads run ahead of it until they wait."""
        drain = threading.current_thread().name == "precdoctor-drain"
        return self._number <= CUDA._waited_for or (drain and self.blocking)

    def synchronize(self) -> None:
        if threading.current_thread().name == "precdoctor-drain":
            if not self.blocking and self._number > CUDA._waited_for:
                CUDA.refuse("the drain spins on an event that nobody else has waited for")
            return
        if self._number <= CUDA._waited_for:
            return  # it came before one that was waited for
        CUDA._waited_for = self._number
        if _may_wait(_caller()):
            return
        step = CUDA.step()
        CUDA.waits[step] = CUDA.waits.get(step, 0) + 1


def _cuda(name, value):
    """A function of ``torch.cuda`` for the recorder; everybody else gets the true one."""
    true = getattr(torch.cuda, name)

    @functools.wraps(true)
    def call(*args, **kwargs):
        return value(*args, **kwargs) if _is_ours(_caller()) else true(*args, **kwargs)

    setattr(torch.cuda, name, call)


def install(*, batches: bool = True, compiled: bool = False) -> None:
    """Patch torch, and have the reference stand for the kernels.

    Args:
        batches: there is a kernel for many tensors at once; without it, none at all, as where Triton is missing.
        compiled: they are the true ones, compiled, and launched into nothing; see ``tests.support.driver``.
    """
    from precdoctor.recording import kernels
    from precdoctor.recording.kernels import cuda, light_launch, reference
    from precdoctor.recording.kernels import row_layout as at
    from precdoctor.recording.kernels.tiling import fits, tiling

    for name, there in (("is_cpu", False), ("is_cuda", True), ("device", _DEVICE)):
        setattr(Tensor, name, _attribute(name, there))
    for name in (
        "item",
        "tolist",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "numpy",
        "cpu",
        "nonzero",
        "unique",
    ):
        setattr(Tensor, name, _waits(Tensor, name))
    for name in ("equal", "nonzero", "masked_select", "unique", "allclose", "bincount"):
        setattr(torch, name, _waits(torch, name))
    for name in ("dot", "histc", "vdot", "matmul", "mm", "addmm"):
        setattr(torch, name, _lacks(torch, name, lambda x: not x.is_floating_point() and not x.is_complex()))
    Tensor.__getitem__ = _getitem(Tensor.__getitem__)
    Tensor.copy_, Tensor.to = _copy(Tensor.copy_), _moved(Tensor.to)
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "scalar_tensor"):
        setattr(torch, name, _made(getattr(torch, name)))
    for name in ("empty_like", "zeros_like", "ones_like", "full_like"):
        setattr(torch, name, _made(getattr(torch, name), like=True))
    torch.from_numpy = _reads_to_host(torch.from_numpy)

    torch.cuda.Event, torch.cuda.ExternalStream = Event, lambda number, **_: Stream(number)
    Tensor.record_stream = lambda _x, _stream: None
    nothing = torch.zeros(16, dtype=torch.uint8)
    for name, value in {
        "current_stream": lambda *_: Stream(CUDA.stream),
        "_initialized": True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: CUDA.capturing,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "device": lambda *_: contextlib.nullcontext(),
        "get_rng_state": lambda *_: nothing.clone(),
        "set_rng_state": lambda *_: None,
        "mem_get_info": lambda *_: (CUDA.free, CUDA.total),
        "memory_allocated": lambda *_: CUDA.allocated,
        "memory_reserved": lambda *_: CUDA.allocated,
        "max_memory_allocated": lambda *_: max(CUDA.peak, CUDA.allocated),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=CUDA.total, multi_processor_count=132),
    }.items():
        _cuda(name, value)

    light_launch.raw_stream = lambda _index: CUDA.stream

    def strides(x):
        return None if x.is_contiguous() else x.stride()

    def measure_at(x, ints, floats, counter, want):
        tiling(x.shape, strides(x), x.dtype, want)  # the kernel asks for it
        blocks = [size for i, size in enumerate(at.BLOCK_SIZES) if want >> i & 1]
        held = (ints, at.INT_WIDTH, torch.int64), (floats, at.FLOAT_WIDTH, torch.float64), (counter, 1, torch.int64)
        rows = [torch.frombuffer((ctypes.c_int64 * n).from_address(a), dtype=kind) for a, n, kind in held]
        reference.measure(x, *rows, blocks)

    def measure_many(group, members, table, to):
        table.describe(members)
        for member in members:
            job = member.job
            if job.restart:
                kernels.bank(group.device).restart(job.slot)
            rows = kernels.bank(group.device).row(job.slot)
            if job.before is None:
                reference.measure(job.x, *rows, to, ())
            else:
                reference.measure_update(job.before, job.x, job.intended, *rows, to)
        return True

    def look(_device, programs, addresses, _chunk, dtype, *, aligned):
        rows, owners, _, out, _ = addresses
        count = max(torch.frombuffer((ctypes.c_int32 * programs).from_address(owners), dtype=torch.int32).tolist()) + 1
        table = torch.frombuffer((ctypes.c_int64 * 3 * count).from_address(rows), dtype=torch.int64).view(-1, 3)
        amax, squares = torch.frombuffer((ctypes.c_double * 2).from_address(out), dtype=torch.float64).zero_()
        for address, numel, _ in table.tolist():
            assert not aligned or address % 16 == 0
            memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
            wide = torch.frombuffer(memory, dtype=dtype).double()
            amax.copy_(torch.maximum(amax, wide.abs().max()))
            squares += wide.square().sum()
        return True

    if compiled:
        from tests.support import driver

        driver.install()
        true_look = cuda.look

        def look_at_nothing(device, programs, addresses, *more, **options):
            ctypes.memset(addresses[3], 0, 16)  # what the kernel would write to
            return true_look(device, programs, addresses, *more, **options)

        cuda.look = look_at_nothing
    elif batches:
        supports = lambda x, want: fits(x.shape, strides(x), want)  # noqa: E731
        cuda._kernel = lambda: SimpleNamespace(supports=supports, measure_at=measure_at, FORMATS=_FORMATS)
        cuda.measure_many, cuda.look = measure_many, look
    else:
        cuda._kernel = lambda: None

    def step() -> int:
        from precdoctor.recording import installation

        return -1 if installation._installed is None else installation._installed.step

    CUDA.step = step


def refused() -> list[str]:
    """What CUDA would have refused so far, and which kernels have failed."""
    from precdoctor.recording.kernels import cuda

    return CUDA.refusals + cuda._failures
