"""Which thread is recorded. Two that train at once would write into the same slots, and a step be a mixture of both.

So the recorder belongs to the first thread that trains; hooks that run in another one do nothing. Threads of autograd's
engine belong to whoever called ``backward``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: Why a step is not looked into: a replay would take back what the other threads do meanwhile, and not see their ops.
SEVERAL = "several threads use models at once"
REPLICAS = "nn.DataParallel runs the model in threads"


class Threads:
    """The recorded thread, and the others.

    Args:
        has_trained: whether a step of a training has begun in the recorded thread.
        in_hook: whether a hook is running in the recorded thread.
        warn: logs and shows a sentence.
    """

    def __init__(
        self, has_trained: Callable[[], bool], in_hook: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        self._has_trained, self._in_hook, self._warn = has_trained, in_hook, warn
        #: Identifiers of threads that are not recorded.
        self.others: set[int] = set()
        #: Some run replicas of a model that the recorded one has called.
        self.run_replicas = False
        #: Module calls in progress in the recorded thread.
        self.calls: list[Any] = []
        #: The identifier of the recorded one.
        self.own = 0
        self._thread: threading.Thread | None = None
        self._warned = False
        self._taking = threading.Lock()

    def elsewhere(self) -> bool:
        """Whether the calling thread, which calls a model, ``backward`` or an optimizer, is another one."""
        number = threading.get_ident()
        return number != self.own and self._is_other(number)

    def is_other(self) -> bool:
        """Whether the calling thread is known to be another one; not without :attr:`others`, so ask for those first."""
        return threading.get_ident() in self.others

    def meet_replica(self) -> None:
        """A replica is called: by ``nn.DataParallel``, for the recorded thread, and in another one."""
        with self._taking:
            met, self.run_replicas = self.run_replicas, True
        if not met:
            self._warn(
                f"{REPLICAS}: activations inside it are not recorded, and a NaN in there is not led to its op; "
                "on one GPU, or with DistributedDataParallel, both are"
            )

    @property
    def why_no_replay(self) -> str | None:
        """Why a step cannot be looked into op by op; null where it can."""
        return SEVERAL if self.others else REPLICAS if self.run_replicas else None

    def _is_other(self, number: int) -> bool:
        if torch._C._current_graph_task_id() != -1:
            return number in self.others
        if self._is_free() and self._taking.acquire(blocking=False):
            try:
                if self._is_free() and self._take(number):  # asked again: another thread may have been first
                    return False
            finally:
                self._taking.release()
        if not self._warned:
            self._warned = True
            self._warn(f"{SEVERAL}; the first one that trains is recorded, the others are not")
        self.others.add(number)
        return True

    def _is_free(self) -> bool:
        """No thread is recorded, or the recorded one has tried a model out, or serves one, and never trained."""
        return self._thread is None or not self._thread.is_alive() or not (self.calls or self._has_trained())

    def _take(self, number: int) -> bool:
        """Make the calling thread the recorded one, unless a hook runs in another: both would write to one slot.

        A hook that begins first sets its mark and then looks at :attr:`others`; here it is the other way round.
        """
        if self._thread is not None and self._thread.is_alive():
            self.others.add(self.own)
            if self._in_hook():
                self.others.discard(self.own)
                return False
        self.others.discard(number)
        self.own, self._thread, self.calls = number, threading.current_thread(), []
        return True
