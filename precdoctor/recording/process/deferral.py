"""Holds signals back while the recorder installs itself, which may take a second."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

#: Seconds after which a held signal is sent again, if it must not be handled at once.
_LATER: Final = 0.01


class HeldSignals:
    """Context in which no Python signal handler runs; on leaving, each handler runs once if its signal came.

    A script may interrupt itself ten times a second with a handler that raises, and try again. Without this, each
    signal would interrupt the installation, which would begin again each time and never finish.

    Args:
        later: let the handlers run shortly after leaving: an import must not end with an unrelated exception.
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
        """Set the original handlers again, unless the script has set others since."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self._hold:
                signal.signal(number, handler)


def _send_again(process: int, numbers: tuple[int, ...]) -> None:
    """Send the signals again to the process that got them; a forked child does not."""
    time.sleep(_LATER)
    if os.getpid() == process:
        for number in numbers:
            os.kill(process, number)
