"""What one step hands to the drain thread: values on their way to the host, nothing that holds a tensor alive."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from precdoctor.recording.kernels import Snapshot
from precdoctor.recording.model import static
from precdoctor.recording.slots.slot_table import Entry

#: A number that is known now, or once the device has got there.
Deferred = float | Callable[[], float] | None


def read(value: Deferred) -> float | None:
    """The number; waits for the device if it has to (drain thread only)."""
    return value() if callable(value) else value


class _Waits(threading.local):
    """How long this thread has waited for devices, in ns."""

    ns = 0


waits: Final = _Waits()


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be read."""
    if not CUDA.get("_initialized", True):  # most often where there is no GPU; asked for several times a step
        return False
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


#: Where torch notes whether it has begun to use a GPU: read so several times a step, without a call.
CUDA: Final = vars(torch.cuda)


def defer(value: Any, *, by_drain: bool = False) -> Deferred:
    """A tensor's scalar, or a number, to be read later without a synchronisation now; null for anything else.

    Args:
        value: a tensor of one element, on any device; or a number.
        by_drain: nobody else waits for it: the drain gives the processor away meanwhile, which training can use.
    """
    if not issubclass(type(value), torch.Tensor):
        return value if type(value) is float else static.number(value)
    if value.is_cpu:
        return float(value.detach())
    host = torch.empty((), dtype=value.dtype, pin_memory=value.is_cuda)
    host.copy_(value.detach().reshape(()), non_blocking=True)
    if not value.is_cuda:
        return lambda: float(host)
    event = torch.cuda.Event(blocking=by_drain)
    event.record(torch.cuda.current_stream(value.device))
    return arrival(event, host)


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def arrival(event: _Event, host: torch.Tensor) -> Callable[[], float]:
    """Read a scalar of the host's once its copy has arrived; the wait is not the recorder's work, and counted apart."""

    def arrived() -> float:
        if not event.query():
            began = time.perf_counter_ns()
            try:
                event.synchronize()
            finally:
                waits.ns += time.perf_counter_ns() - began
        return float(host)

    return arrived


def deferred(x: torch.Tensor, *, by_drain: bool = True) -> Callable[[], list[float]]:
    """The numbers of a vector, without waiting for its device now; ``by_drain`` as in :func:`defer`."""
    if x.is_cpu:
        values: list[float] = x.tolist()
        return lambda: values
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    host.copy_(x, non_blocking=True)
    if not x.is_cuda:
        return host.tolist
    event = torch.cuda.Event(blocking=by_drain)
    event.record(torch.cuda.current_stream(x.device))
    arrived = arrival(event, host[0])

    def read() -> list[float]:
        arrived()
        values: list[float] = host.tolist()
        return values

    return read


def looks_like_a_scale(factor: float) -> bool:
    """Whether a factor at the root of a backward pass can be nothing else: a power of two from 16 up."""
    return 16 <= factor < math.inf and math.log2(factor).is_integer()


@dataclass
class OpBatch:
    """The list of ops of one step: columns of the ops table, ``rank`` left out."""

    step: int
    columns: dict[str, Any]
    rows: int


@dataclass(slots=True, eq=False)
class StepFacts:
    """The steps row in the making; see ``runlog.schema.STEPS``."""

    step: int
    optimizer: str = ""
    #: Of an inference run, the model that was called; else empty.
    root: str = ""
    complete: bool = False
    wall_time: float = 0.0
    micro_steps: int = 0
    losses: list[Deferred] = field(default_factory=list)
    lrs: list[Deferred] = field(default_factory=list)
    #: Sampled steps take the norm from the weight gradients' rows; the others carry it here.
    grad_norm: Deferred = None
    #: Largest magnitude among those gradients; not finite exactly if one of them is not.
    grad_amax: Deferred = None
    #: They still carried the loss scale.
    grad_norm_scaled: bool = False
    #: Root, module and name of the optimizer's parameters; null when not every gradient of theirs has a row.
    gradients_of: frozenset[tuple[str, str, str]] | None = None
    clip_norm: float | None = None
    clipped_before_unscale: bool | None = None
    loss_scale: Deferred = None
    growth_tracker: Deferred = None
    found_inf: Deferred = None
    #: A loss given to backward was FP16, whose range a loss scale can leave.
    narrow_loss: bool = False
    #: The optimizer's own step hook never fired.
    not_reached: bool = False
    #: The script gave the attempt up by itself: it threw the gradients away, or updated the scaler without a step.
    left_out: bool = False
    autocast_dtype: str | None = None
    sampled: bool = False
    #: Host time in our hooks, without what they waited for the device.
    recorder_ns: int = 0
    wait_ns: int = 0
    #: Of a step that was scanned: what that took, without the ops themselves.
    scan_ns: int = 0
    step_ns: int = 0
    #: Constant factors found at the root of the backward passes (``loss * 65536``).
    root_factors: list[float] = field(default_factory=list)
    #: Launch counts per device at the beginning of each micro-step but the first.
    micro_starts: list[dict[torch.device, int]] = field(default_factory=list)
    #: Where ``backward`` was called, outside torch.
    backward_file: str | None = None
    backward_line: int | None = None
    #: Every op of the step, where it is listed.
    ops: OpBatch | None = None


@dataclass(slots=True, eq=False)
class StepBatch:
    """One step for the drain thread."""

    facts: StepFacts
    entries: list[Entry]
    snapshots: dict[torch.device, Snapshot]
    #: Tensors rows given up while the step waited in the queue.
    dropped: int = 0

    def give_up_tensors(self) -> None:
        """Let go of what the tensors rows would have been made from; the steps row stays."""
        self.dropped += len(self.entries)
        self.release()

    def release(self) -> None:
        """Give the memory of the tensors rows back."""
        for snapshot in self.snapshots.values():
            snapshot.release()
        self.entries, self.snapshots = [], {}


@dataclass
class EventBatch:
    """Events that belong to no step's rows."""

    events: list[dict[str, Any]]
