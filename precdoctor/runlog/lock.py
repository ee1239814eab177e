"""Detects whether the writer of a rank directory is alive, by the advisory lock that it holds on the directory.

The kernel drops the lock when the process ends, however it ends, so a free lock means that nobody writes there any
more. A child made by ``fork`` closes its copy at once, so a data loader that outlives its rank does not hold the lock.
On file systems without ``flock`` no writer counts as alive. A part that is then sealed under a living writer is sealed
again, completely, by that writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def above_streams(handle: int) -> int:
    """Return a descriptor above 2 for the open file ``handle``, which is closed if it is a lower one.

    A training whose stdout was closed (``>&-``) may still print to descriptor 1, and would then write into our file.
    """
    if handle > 2:
        return handle
    try:
        return fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(handle)


class DirectoryLock:
    """An exclusive lock on a directory, held until :meth:`release` or the end of this process.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the directory cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._handle: int | None = above_streams(handle)
        try:
            _lock(self._handle)
        except BlockingIOError:
            self.forget()
            raise
        except OSError:
            pass  # this file system has no locks
        _held.add(self)

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close this process's handle without unlocking; a forked process with a copy of it keeps the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> None:
    """Take the exclusive lock. Retries for 20 ms, because :func:`is_locked` holds a lock for some microseconds.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file system has no locks.
    """
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.001)
    return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def is_locked(directory: Path) -> bool:
    """Return whether a living process writes into this rank directory; False on file systems without locks.

    Raises:
        OSError: the directory cannot be opened.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # A shared lock: two readers that ask at the same time must not take each other for a writer.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def is_alive(process: int) -> bool:
    """Return whether a process of this number runs on this host; a zombie does not run."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    with contextlib.suppress(OSError):  # there is no /proc on macOS
        state = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return state[:1] not in (["Z"], ["X"])
    return True
