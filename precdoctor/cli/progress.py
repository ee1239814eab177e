"""One line on a terminal that says how far a command has come, once it takes longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

#: Seconds before the first line, and between two of them.
_PATIENCE, _PERIOD = 1.0, 0.2
_ERASE = "\r\x1b[2K"


class Progress:
    """Called with what is being done, how much of it is done, and how much there is; the line goes with the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + _PATIENCE
        self._shown = False

    def __call__(self, what: str, done: int, of: int) -> None:
        now = self._clock()
        if done >= of:
            if self._shown:
                self._write(_ERASE)
            self._shown = False
        elif now >= self._next:
            self._next = now + _PERIOD
            self._write(f"{_ERASE}{what} {done:,} of {of:,}")
            self._shown = True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
