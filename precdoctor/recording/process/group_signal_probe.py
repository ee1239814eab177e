"""Tells signals that are sent to everybody here from those that are meant for the parent of a recorded run alone.

Job control, ``timeout``, batch systems and terminals signal the whole process group or job: the command gets such a
signal by itself, and must not be given it a second time, which would cut short what it does about the first. Nothing
that comes with a signal tells which kind it is. So another process stands by, in the same group and doing nothing: what
it gets, everybody got.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Collection
from typing import NoReturn

#: Seconds in which a signal for everybody reaches everybody, also where each process is sent it by itself.
_PATIENCE = 0.1
#: ... and the last of them, when it has reached the bystander.
_SETTLING = 0.02


class Bystander:
    """Stands by from when it is made until :meth:`close`, or until this process is gone, however that ends."""

    def __init__(self, watched: Collection[int]) -> None:
        """``watched``: signals to tell of, blocked in the calling thread.

        Raises:
            OSError: no process can be started.
        """
        self._reports, reports = os.pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = os.fork()
        except OSError:
            for end in (self._reports, reports, lifeline, self._lifeline):
                os.close(end)
            raise
        if self._process == 0:
            _stand_by(watched, reports, lifeline)
        os.close(reports)
        os.close(lifeline)
        #: Reported and not asked for yet.
        self._heard: set[int] = set()

    def heard(self, number: int) -> bool:
        """Whether a signal that this process was just sent was sent to everybody; what else came of it is taken."""
        deadline = time.monotonic() + _PATIENCE
        while number not in self._heard and self._listen(deadline - time.monotonic()):
            pass
        if number not in self._heard:
            return False
        time.sleep(_SETTLING)
        while signal.sigtimedwait({number}, 0) is not None:
            pass  # `timeout` signals us first, then us and everybody else
        while self._listen(0):
            pass
        self._heard.discard(number)
        return True

    def _listen(self, seconds: float) -> bool:
        """Whether anything was reported; false when the bystander is gone."""
        if not select.select([self._reports], [], [], max(0.0, seconds))[0]:
            return False
        reports = os.read(self._reports, 4096)
        self._heard.update(reports)
        return bool(reports)

    def close(self) -> None:
        """Nobody need stand by any more."""
        os.close(self._lifeline)
        os.close(self._reports)
        os.kill(self._process, signal.SIGKILL)  # it may have been stopped
        os.waitpid(self._process, 0)


def bystander(watched: Collection[int]) -> Bystander | None:
    """One, where it can be had: without it every signal passes for one that was meant for this process alone."""
    if threading.active_count() > 1:
        return None  # forking is for processes of one thread
    with contextlib.suppress(OSError):
        return Bystander(watched)
    return None


def _stand_by(watched: Collection[int], reports: int, lifeline: int) -> NoReturn:
    try:
        # Whoever reads what the command writes is to see its end. (One more entry is the listing's own.)
        for end in {int(name) for name in os.listdir("/dev/fd")} - {reports, lifeline}:  # noqa: PTH208 - no files
            with contextlib.suppress(OSError):
                os.close(end)
        for number in watched:
            signal.signal(number, lambda number, _: os.write(reports, bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.read(lifeline, 1)  # until the parent is gone
    finally:
        os._exit(0)
