"""Tensors that are measured together: kept while a hook walks over them, launched when it has seen them all.

On CUDA a launch costs more than a small tensor does, so all weights go into one, all gradients an optimizer is given,
all updates, all optimizer state; on the CPU nothing is kept, and each is measured at once. Within a kind the order of
execution that rows carry is that of the launch: by dtype and shape first, then as they came.
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

#: Of tensors that nobody else may keep any more, so many bytes wait for a launch at most.
HELD: int = 64 << 20


@dataclass(frozen=True)
class Update:
    """Measures a weight after a step against what it was before and what was meant to be added."""

    before: Tensor
    intended: Tensor | kernels.Adam

    def __call__(self, after: Tensor, slot: int) -> None:
        """Accumulate the update row."""
        kernels.update(self.before, after, self.intended, slot)


class BatchedLaunch(AbstractContextManager["BatchedLaunch"]):
    """Tensors of one kind; a context that launches what it holds when it is left.

    Args:
        limit: bytes to hold at most, for tensors that might otherwise have been freed; null for those that are there
            anyway.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._tables = kernels.Tables()
        self._jobs: dict[int, kernels.Job] = {}
        self._held = 0
        #: Gradients arrive on a thread per device.
        self._lock = threading.Lock()

    def __exit__(self, *_error: object) -> None:
        self.flush()

    def takes(self, x: Tensor, slot: int, launch: Callable[[Tensor, int], None], *, restart: bool) -> bool:
        """Keep a tensor for the next launch; false where it is to be measured at once, by itself.

        Args:
            x: stays as it is until then, which is up to the caller.
            slot: of its statistics.
            launch: ``kernels.stat`` or an :class:`Update`; others are not known here.
            restart: the slot forgets what the step has put there before.
        """
        update = launch if isinstance(launch, Update) else None
        if update is None and launch is not kernels.stat:
            return False
        before, intended = (None, None) if update is None else (update.before, update.intended)
        if isinstance(intended, kernels.Adam):
            return False
        if slot in self._jobs:  # a slot is in a launch once: its programs run in any order
            self.flush()
        if intended is not None and x.is_cuda and intended.element_size() < torch.float32.itemsize:
            intended = intended.float()  # what the kernel for many updates reads
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
        """Launch what has been kept."""
        with self._lock:
            jobs, self._jobs, self._held = self._jobs, {}, 0
        if jobs:
            with kernels.apart_from_user_modes():
                kernels.together(list(jobs.values()), self._tables)


class Gradients:
    """Weight gradients as they are accumulated, which may wait for the end of the backward pass.

    But only if nobody writes to them until then, or frees them, as optimizers inside the backward pass do. The first
    pass shows that, and nothing waits in it; nor in any with other ranks, whose reductions write to them unseen.
    """

    def __init__(self) -> None:
        self._together = BatchedLaunch(HELD)
        #: Whether they may wait; null while that is not known.
        self._quiet: bool | None = None
        #: Those that have come since the last end.
        self.seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def waiting_room(self, gradient: Tensor) -> BatchedLaunch | None:
        """Where a gradient that has just been accumulated may wait to be measured; null where it may not."""
        if (
            self._quiet is False
            or gradient.layout is not torch.strided
            or not kernels.gathers(gradient)
            or attach.has_other_ranks()
        ):
            return None
        known = self.seen.get(id(gradient))
        if known is not None and known[0]() is not gradient:  # that one is gone already
            self._quiet = False
            return None
        self.seen[id(gradient)] = (weakref.ref(gradient), tensor_leaves.version(gradient))
        return self._together if self._quiet else None

    def end(self) -> None:
        """The backward pass has ended."""
        seen, self.seen = self.seen, {}
        self._together.flush()
        if seen and self._quiet is not False:
            self._quiet = all(
                (x := ref()) is not None and tensor_leaves.version(x) == was for ref, was in seen.values()
            )
