"""Holds back what the script's signal handlers do while the recorder gets ready, which may take a second."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

#: Seconds after which a held signal is sent again where it must not be handled at once.
_LATER: Final = 0.01


class HeldSignals:
    """Inside of it no Python signal handler runs; afterwards each one runs once for the signals that came.

    A script may interrupt itself ten times a second, by a handler that raises, and try again. Getting ready would be
    interrupted each time and begin anew each time, and the script would never come past it.

    Args:
        later: handle them shortly afterwards rather than on leaving: an import must not end by an exception that has
            nothing to do with it.
    """

    def __init__(self, *, later: bool = False) -> None:
        self._later = later
        self._handlers: dict[int, Any] = {}
        self._held: dict[int, None] = {}
        self._hold: Callable[[int, FrameType | None], None] = lambda number, _frame: self._held.setdefault(number)

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run in the main thread only
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        held, self._held = tuple(self._held), {}
        if held and self._later:
            _thread.start_new_thread(_send_again, (os.getpid(), held))
            return
        for number in held:
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self._hold:
                signal.signal(number, handler)


def _send_again(process: int, numbers: tuple[int, ...]) -> None:
    time.sleep(_LATER)
    if os.getpid() == process:
        for number in numbers:
            os.kill(process, number)
