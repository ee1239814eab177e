"""Distinguishes signals sent to the whole process group from signals sent only to the parent of a recorded run.

Job control, ``timeout``, batch systems and terminals signal the whole group or job. Then the command has the signal
already, and must not get it again: that would cut short its reaction to the first. A signal does not carry to whom it
was sent. So another process waits idle in the same group: a signal that it gets, the whole group got.
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

#: Seconds within which a group's signal reaches all its processes, even if each is signalled separately.
_PATIENCE = 0.1
#: Seconds to wait for the signal to reach the others once the bystander has got it.
_SETTLING = 0.02


class Bystander:
    """A child process in our group that reports the signals it gets, until :meth:`close` or the end of this process."""

    def __init__(self, watched: Collection[int]) -> None:
        """Start the process. ``watched``: signals to report, blocked in the calling thread.

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
        #: Signals reported by the bystander that :meth:`reached_group` has not returned yet.
        self._reported: set[int] = set()

    def reached_group(self, number: int) -> bool:
        """Return whether a signal that this process just got went to the whole group; then discard its repetitions."""
        deadline = time.monotonic() + _PATIENCE
        while number not in self._reported and self._read_reports(deadline - time.monotonic()):
            pass
        if number not in self._reported:
            return False
        time.sleep(_SETTLING)
        while signal.sigtimedwait({number}, 0) is not None:
            pass  # `timeout` signals us, then the whole group
        while self._read_reports(0):
            pass
        self._reported.discard(number)
        return True

    def _read_reports(self, seconds: float) -> bool:
        """Wait for reports. Return False if none came, or the bystander is gone."""
        if not select.select([self._reports], [], [], max(0.0, seconds))[0]:
            return False
        reports = os.read(self._reports, 4096)
        self._reported.update(reports)
        return bool(reports)

    def close(self) -> None:
        os.close(self._lifeline)
        os.close(self._reports)
        os.kill(self._process, signal.SIGKILL)  # KILL, because it may be stopped
        os.waitpid(self._process, 0)


def bystander(watched: Collection[int]) -> Bystander | None:
    """Start a bystander. None if that fails: then every signal counts as sent to this process only."""
    if threading.active_count() > 1:
        return None  # fork is safe only in a process with one thread
    with contextlib.suppress(OSError):
        return Bystander(watched)
    return None


def _stand_by(watched: Collection[int], reports: int, lifeline: int) -> NoReturn:
    """The bystander's program: report signals until the parent is gone."""
    try:
        # Close inherited files, so that a reader of the command's output sees its end. (One entry is the listing's.)
        for end in {int(name) for name in os.listdir("/dev/fd")} - {reports, lifeline}:  # noqa: PTH208 - no files
            with contextlib.suppress(OSError):
                os.close(end)
        for number in watched:
            signal.signal(number, lambda number, _: os.write(reports, bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.read(lifeline, 1)  # until the parent is gone
    finally:
        os._exit(0)
