"""The two loops of ``watch``: a screen that is redrawn, or lines printed into a pipe.

The screen reads single key presses, and restores the terminal when it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from precdoctor.diagnosis.claims.words import percent
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.live.check import Check
from precdoctor.reporting.live.picture import Picture
from precdoctor.reporting.live.screen import Size, finding_line, label_of, screen
from precdoctor.reporting.live.watcher import OVER, Watcher
from precdoctor.reporting.text import SERIES, clean, factor, number

#: Longest pause between two checks of the keyboard and of a running diagnosis, in seconds.
_LONGEST_WAIT = 0.2
#: Largest share of the time that polling the run may take; longer polls are made less often.
_POLL_SHARE = 0.2


class Keys:
    """Reads key presses from the terminal on stdin; without a terminal there are none."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wait(self, seconds: float) -> str:
        """Wait for key presses and return them; "" after ``seconds`` without one, or if the terminal has hung up."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._handle], [], [], seconds)
        if not ready:
            return ""
        typed = os.read(self._handle, 64)
        if not typed:  # end of file: select would return at once for ever
            self._handle = None
        return typed.decode(errors="replace")


@contextlib.contextmanager
def key_presses() -> Iterator[Keys]:
    """Put the terminal into cbreak mode (single keys, no echo, Ctrl-C still interrupts); restore it however it ends.

    SIGTERM and SIGHUP raise SystemExit with status 128 + n. Ctrl-Z is ignored, because the shell would get a terminal
    without echo.
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
            with contextlib.suppress(termios.error):  # the terminal has hung up
                termios.tcsetattr(handle, termios.TCSAFLUSH, mode)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def show_live(watcher: Watcher, check: Check, console: Console, keys: Keys, interval: float) -> None:
    """Redraw the screen until ``q`` or Escape is pressed; the previous screen content is restored at the end."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        due = 0.0
        while True:
            now = time.monotonic()
            news = check.poll()
            if now >= due:
                watcher.poll()
                due = time.monotonic() + max(interval, (time.monotonic() - now) / _POLL_SHARE)
                news = True
            if check.due(watcher.grown, last=watcher.phase in OVER) and watcher.picture.last_step is not None:
                check.begin(watcher.grown)
                news = True
            if news:
                console.size = ConsoleDimensions(*shutil.get_terminal_size())  # it may have been resized
                size = Size(*console.size, ascii_only=not can_draw(console))
                live.update(screen(watcher, check, size), refresh=True)
            if keys.wait(min(_LONGEST_WAIT, interval)) in {"q", "Q", "\x1b"}:
                return


def print_lines(watcher: Watcher, check: Check, console: Console, interval: float) -> None:
    """Print a line per interval in which the state changed, and one per new finding; return when the run is over."""
    last_line: str | None = None
    printed: set[tuple[object, ...]] = set()
    while True:
        watcher.poll()
        line = progress(watcher)
        if line != last_line:
            console.print(line, soft_wrap=True)
            last_line = line
        over, stepped = watcher.phase in OVER, watcher.picture.last_step is not None
        if stepped and check.due(watcher.grown, last=over):
            check.begin(watcher.grown)
        _pause(0.0 if over else interval, check.poll, until_idle=check if over else None)
        for finding in check.findings or ():
            key = (finding.get("code"), str(finding.get("location")))
            if key not in printed:
                printed.add(key)
                console.print(finding_line(finding), soft_wrap=True)
        if over and not (stepped and check.due(watcher.grown, last=True)):
            if stepped and not printed:
                console.print("no findings" if check.findings is not None else clean(check.problem or "not judged"))
            return


def _pause(seconds: float, poll: Callable[[], bool], until_idle: Check | None) -> None:
    """Wait ``seconds``, and until ``until_idle``, if given, has ended its diagnosis; poll meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until or (until_idle is not None and until_idle.busy):
        poll()
        time.sleep(min(_LONGEST_WAIT, max(0.01, until - time.monotonic())))
    poll()


def progress(watcher: Watcher) -> str:
    """The state in one line: ``running: step 148, loss 0.0399, gradient norm 0.052, loss scale 2^19, ...``."""
    picture = watcher.picture
    words = [] if picture.last_step is None else [f"step {picture.last_step}", *_values(picture)]
    if watcher.words:
        words.append(watcher.words)
    if watcher.problem:
        words.append(clean(watcher.problem, 300))
    phase = watcher.phase.value
    return f"{phase}: {', '.join(words)}" if words else phase


def _values(picture: Picture) -> list[str]:
    words = []
    for name, (title, _, spell) in SERIES.items():
        if name != "lr" and (value := picture.series[name].last) is not None:
            words.append(f"{title} {spell(value)}")
    if picture.skipped:
        words.append(f"{number(picture.skipped)} skipped")
    if picture.non_finite:
        words.append(f"{number(picture.non_finite)} non-finite")
    for tensor in picture.tightest(1):
        room = "NaN/Inf" if tensor.bad_since is not None else f"{factor(tensor.headroom)} below its maximum"
        words.append(f"{label_of(tensor)} {room}")
    if picture.overhead is not None:
        words.append(f"recorder {percent(picture.overhead)}")
    return words
