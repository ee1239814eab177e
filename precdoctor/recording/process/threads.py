"""Chooses the recorded thread. Two threads that train at once would write to the same slots and mix their steps.

The recorder belongs to the first thread that trains; hooks that run in another thread do nothing. Threads of autograd's
engine belong to the thread that called ``backward``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: Why steps are not replayed: a replay would undo what other threads do meanwhile, and not see their ops.
SEVERAL = "several threads use models at once"
REPLICAS = "nn.DataParallel runs the model in threads"


class Threads:
    """The recorded thread, and the others.

    Args:
        has_trained: returns whether a training step has begun in the recorded thread.
        in_hook: returns whether a hook is running in the recorded thread.
        warn: logs and prints a sentence.
    """

    def __init__(
        self, has_trained: Callable[[], bool], in_hook: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        self._has_trained, self._in_hook, self._warn = has_trained, in_hook, warn
        #: Identifiers of the threads that are not recorded.
        self.others: set[int] = set()
        #: Whether some threads run replicas of a model that the recorded thread has called.
        self.run_replicas = False
        #: Module calls in progress in the recorded thread.
        self.calls: list[Any] = []
        #: Identifier of the recorded thread.
        self.own = 0
        self._thread: threading.Thread | None = None
        self._warned = False
        self._take_lock = threading.Lock()

    def elsewhere(self) -> bool:
        """Return whether the calling thread, which runs a model or an optimizer, is not the recorded one."""
        number = threading.get_ident()
        return number != self.own and self._is_other(number)

    def is_other(self) -> bool:
        """Return whether the calling thread is known not to be recorded. Check first that there are :attr:`others`."""
        return threading.get_ident() in self.others

    def meet_replica(self) -> None:
        """Note that ``nn.DataParallel`` runs a replica of the recorded thread's model in this thread."""
        with self._take_lock:
            met, self.run_replicas = self.run_replicas, True
        if not met:
            self._warn(
                f"{REPLICAS}: activations inside it are not recorded, and a NaN in there is not led to its op; "
                "on one GPU, or with DistributedDataParallel, both are"
            )

    @property
    def why_no_replay(self) -> str | None:
        """Why steps cannot be replayed; None if they can."""
        return SEVERAL if self.others else REPLICAS if self.run_replicas else None

    def _is_other(self, number: int) -> bool:
        """Return whether the thread is not the recorded one; make it the recorded one if there is none."""
        if torch._C._current_graph_task_id() != -1:
            return number in self.others
        if self._is_free() and self._take_lock.acquire(blocking=False):
            try:
                if self._is_free() and self._take(number):  # again: another thread may have been faster
                    return False
            finally:
                self._take_lock.release()
        if not self._warned:
            self._warned = True
            self._warn(f"{SEVERAL}; the first one that trains is recorded, the others are not")
        self.others.add(number)
        return True

    def _is_free(self) -> bool:
        """Return whether no thread is recorded, or the recorded one is gone, or is in no call and has never trained."""
        return self._thread is None or not self._thread.is_alive() or not (self.calls or self._has_trained())

    def _take(self, number: int) -> bool:
        """Make the calling thread the recorded one; return False if a hook runs in the present one.

        Both threads would write to one slot. A hook sets its mark before it checks :attr:`others`; the order here is
        the reverse, so one of the two notices the other.
        """
        if self._thread is not None and self._thread.is_alive():
            self.others.add(self.own)
            if self._in_hook():
                self.others.discard(self.own)
                return False
        self.others.discard(number)
        self.own, self._thread, self.calls = number, threading.current_thread(), []
        return True
