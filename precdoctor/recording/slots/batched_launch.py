"""Tensors that are measured together: collected while a hook iterates over them, launched after the last one.

On CUDA a launch costs more than measuring a small tensor, so all weights share one launch, likewise all gradients given
to an optimizer, all updates, all optimizer state. On the CPU each tensor is measured at once. Within a kind the rows
give the order of the launches: by dtype and memory layout first, then by arrival.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.process import attach

#: Maximum bytes waiting for a launch of tensors that would otherwise be freed.
HELD: int = 64 << 20


@dataclass(frozen=True)
class Update:
    """Measures a weight after a step against its old value and the intended update."""

    before: Tensor
    intended: Tensor | kernels.Adam

    def __call__(self, after: Tensor, slot: int) -> None:
        kernels.update(self.before, after, self.intended, slot)


class BatchedLaunch(AbstractContextManager["BatchedLaunch"]):
    """A context that collects tensors of one kind and launches them together at its end.

    ``limit``: maximum bytes to hold, for tensors that would otherwise be freed; None for tensors that stay alive.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._tables = kernels.Tables()
        self._jobs: dict[int, kernels.Job] = {}
        self._held = 0
        #: Gradients arrive on one thread per device.
        self._lock = threading.Lock()

    def __exit__(self, *_error: object) -> None:
        self.flush()

    def takes(self, x: Tensor, slot: int, launch: Callable[[Tensor, int], None], *, restart: bool) -> bool:
        """Collect a tensor for the next launch. Return False if the caller must measure it by itself, at once.

        Args:
            x: must not change until the launch; the caller ensures it.
            launch: ``kernels.stat`` or an :class:`Update`; others are refused.
            restart: discard the slot's values of this step first.
        """
        update = launch if isinstance(launch, Update) else None
        if update is None and launch is not kernels.stat:
            return False
        before, intended = (None, None) if update is None else (update.before, update.intended)
        if isinstance(intended, kernels.Adam):
            return False
        if slot in self._jobs:  # one launch must not contain a slot twice: its programs run in any order
            self.flush()
        if intended is not None and x.is_cuda and intended.element_size() < torch.float32.itemsize:
            intended = intended.float()  # the kernel for many updates reads FP32
        if not kernels.gathers(x, before, intended):
            return False
        with self._lock:
            self._jobs[slot] = kernels.Job(x, slot, restart, before, intended, kernels.stream_of(x))
            if self._limit is not None:
                self._held += sum(t.numel() * t.element_size() for t in (x, before, intended) if t is not None)
            full = self._limit is not None and self._held > self._limit
        if full:
            self.flush()
        return True

    def flush(self) -> None:
        with self._lock:
            jobs, self._jobs, self._held = self._jobs, {}, 0
        if jobs:
            with kernels.apart_from_user_modes():
                kernels.together(list(jobs.values()), self._tables)


class Gradients:
    """Weight gradients, measured together at the end of the backward pass if they stay unchanged until then.

    Optimizers inside the backward pass write to them or free them earlier. The first pass, in which nothing waits,
    shows whether this happens. With other ranks nothing ever waits, because their reductions write to gradients unseen.
    """

    def __init__(self) -> None:
        self._together = BatchedLaunch(HELD)
        #: Whether gradients may wait; None while unknown.
        self._may_wait: bool | None = None
        #: Weak reference and version of the gradients since the last :meth:`end`, by ``id``.
        self.seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def waiting_room(self, gradient: Tensor) -> BatchedLaunch | None:
        """Return the collector in which a newly accumulated gradient may wait; None if it must be measured at once."""
        if (
            self._may_wait is False
            or gradient.layout is not torch.strided
            or not kernels.gathers(gradient)
            or attach.has_other_ranks()
        ):
            return None
        known = self.seen.get(id(gradient))
        if known is not None and known[0]() is not gradient:  # that gradient has been freed already
            self._may_wait = False
            return None
        self.seen[id(gradient)] = (weakref.ref(gradient), tensor_leaves.version(gradient))
        return self._together if self._may_wait else None

    def end(self) -> None:
        """Handle the end of a backward pass: launch, and check that no gradient was changed or freed."""
        seen, self.seen = self.seen, {}
        self._together.flush()
        if seen and self._may_wait is not False:
            self._may_wait = all(
                (x := ref()) is not None and tensor_leaves.version(x) == was for ref, was in seen.values()
            )
