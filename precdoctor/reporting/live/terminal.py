"""Single key presses, and a terminal that is as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType


class Keys:
    """What is typed, key by key; without a terminal on stdin nothing ever is."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait(self, seconds: float) -> str:
        """The keys pressed, as soon as there is one; empty after ``seconds``, or when the terminal has hung up."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._handle], [], [], seconds)
        if not ready:
            return ""
        typed = os.read(self._handle, 64)
        if not typed:  # end of file: it would be ready for ever
            self._handle = None
        return typed.decode(errors="replace")


@contextlib.contextmanager
def key_presses() -> Iterator[Keys]:
    """Keys reach us one by one and unechoed; Ctrl-C stays an interrupt. Whatever ends the block, the mode comes back.

    SIGTERM and SIGHUP end the block as an exit does, with 128 + n. Stopping (Ctrl-Z) is put off: the shell would get a
    terminal without echo.
    """
    handle = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    handlers: dict[int, Callable[[int, FrameType | None], object] | int] = {
        signal.SIGTERM: _leave,
        signal.SIGHUP: _leave,
        signal.SIGTSTP: signal.SIG_IGN,
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        if handle is None:
            yield Keys(None)
            return
        import termios
        import tty

        mode = termios.tcgetattr(handle)
        try:
            tty.setcbreak(handle)
            yield Keys(handle)
        finally:
            with contextlib.suppress(termios.error):  # hung up: nothing is left to restore
                termios.tcsetattr(handle, termios.TCSAFLUSH, mode)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
