"""Which thread is recorded. Two that train at once would write into the same slots, and a step be a mixture of both.

So the recorder belongs to the first thread that trains; hooks that run in another one do nothing. Threads of autograd's
engine belong to whoever called ``backward``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: Why a step is not looked into: a replay would take back what the other threads do meanwhile.
SEVERAL = "several threads use models at once"


class Threads:
    """The recorded thread, and the others.

    Args:
        has_trained: whether a step of a training has begun in the recorded thread.
        warn: logs and shows a sentence.
    """

    def __init__(self, has_trained: Callable[[], bool], warn: Callable[[str], None]) -> None:
        self._has_trained, self._warn = has_trained, warn
        #: Identifiers of threads that are not recorded.
        self.others: set[int] = set()
        #: Module calls in progress in the recorded thread.
        self.calls: list[Any] = []
        self._own = 0
        self._thread: threading.Thread | None = None
        self._warned = False

    def elsewhere(self) -> bool:
        """Whether the calling thread, which calls a model, ``backward`` or an optimizer, is another one."""
        number = threading.get_ident()
        return number != self._own and self._is_other(number)

    def is_other(self) -> bool:
        """Whether the calling thread is known to be another one; not without :attr:`others`, so ask for those first."""
        return threading.get_ident() in self.others

    def _is_other(self, number: int) -> bool:
        if torch._C._current_graph_task_id() != -1:
            return number in self.others
        # The recorded thread may have tried a model out, or serve one, and never train.
        if self._thread is None or not self._thread.is_alive() or not (self.calls or self._has_trained()):
            if self._thread is not None and self._thread.is_alive():
                self.others.add(self._own)
            self.others.discard(number)
            self._own, self._thread, self.calls = number, threading.current_thread(), []
            return False
        if not self._warned:
            self._warned = True
            self._warn(f"{SEVERAL}; the first one that trains is recorded, the others are not")
        self.others.add(number)
        return True
