"""What several commands share: finding the run, how far its reading has come, and where reports go."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from precdoctor.cli.values import OUTPUT_FORMATS
from precdoctor.errors import RunExistsError, UsageError, did_you_mean

if TYPE_CHECKING:
    from precdoctor.cli.config import Settings
    from precdoctor.reporting.outputs import Report
    from precdoctor.runlog import Run


def say(message: str) -> None:
    """Talk goes to stderr, so that stdout holds data only."""
    from precdoctor.reporting.text import clean

    print(clean(message), file=sys.stderr)  # noqa: T201 - the program talking


def say_command(command: str) -> None:
    """What to type next, indented, on a line of its own and whole; its words are quoted for a shell."""
    print(f"  {command}", file=sys.stderr)  # noqa: T201 - the program talking


def settings_in_force(*, whole: bool = False) -> Settings:
    """The settings of this process; what was found elsewhere, and what is not used, is named on stderr.

    Args:
        whole: a file that is not used is an error: a gate without its settings could pass what it should fail.

    Raises:
        UsageError: see :class:`~precdoctor.cli.config.Settings`, and ``whole``.
    """
    from precdoctor.cli.config import Settings

    settings = Settings()
    if whole and settings.refused:
        raise UsageError(settings.refused[0])
    for note in (*settings.refused, *settings.notes):
        say(f"precdoctor: {note}")
    return settings


def opened(run: Path | None, engine: str | None = None) -> Run:
    """The run at ``run``, or the newest one, which is then named on stderr; a terminal shows how reading goes on.

    Args:
        run: its directory.
        engine: as ``--engine`` takes it.

    Raises:
        UsageError: there is no such engine.
        RunNotFoundError, RunUnreadableError: as :func:`precdoctor.runlog.open_run`.
    """
    from precdoctor.runlog import open_run
    from precdoctor.runlog.layout import newest_run
    from precdoctor.runlog.pieces import checked_engine

    if run is None:
        run = newest_run()
        say(f"newest run: {run}")
    found = open_run(run)
    found.engine = checked_engine(engine)
    if sys.stderr.isatty():
        found.progress = Progress(sys.stderr)
    return found


@contextlib.contextmanager
def destination(file: Path | None, *, force: bool) -> Iterator[IO[str]]:
    """Stdout, or a new file that is announced when it is complete. An empty one counts as new: CI runners make them.

    Raises:
        RunExistsError: the file holds something and ``force`` is not given.
        UsageError: the file cannot be written.
    """
    if file is None:
        yield sys.stdout
        return
    try:
        blank = is_stream(file) or (file.is_file() and file.stat().st_size == 0)
        with file.open("w" if force or blank else "x", encoding="utf-8", errors="backslashreplace") as stream:
            yield stream
    except FileExistsError:
        raise RunExistsError(f"{file} is already there; give another name, or --force to replace it") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    say(f"Wrote {file}")


def is_stream(file: Path) -> bool:
    """Whether a device or a pipe is there (``/dev/null``, ``>(less)``): it is written to, and never replaced."""
    return file.exists() and not (file.is_file() or file.is_dir())


def rule_options(settings: Settings) -> dict[str, dict[str, Any]]:
    """The rule options of the settings file without those of the gate's regressions, which only the gate knows."""
    from precdoctor.comparison.regressions import REGRESSIONS

    regressions = {name for r in REGRESSIONS for name in (r.code, r.name)}
    return {code: options for code, options in settings.rules.items() if code not in regressions}


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


def deliver(report: Report, shape: str, output: Path | None, also: Iterable[str], *, force: bool) -> None:
    """Write the report in every format asked for.

    Raises:
        UsageError: ``also`` is not FORMAT=FILE, the same file twice, or a file that cannot be written.
        RunExistsError: a file is there and ``force`` is not given.
    """
    from precdoctor.reporting.outputs import WRITERS

    wanted = [(shape, output), *(_parsed(entry) for entry in also)]
    files = [file for _, file in wanted if file is not None]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise UsageError(f"two reports would be written to {twice}; give each its own file")
    # stdout last: whoever reads it may stop reading (`| head`), and that ends us
    for name, file in sorted(wanted, key=lambda w: w[1] is None):
        with destination(file, force=force) as stream:
            WRITERS[name](report, stream)


def _parsed(entry: str) -> tuple[str, Path]:
    shape, equals, file = entry.partition("=")
    if not equals or not file:
        raise UsageError(f"--also takes FORMAT=FILE, such as junit=precdoctor.xml, got {entry!r}")
    if shape not in OUTPUT_FORMATS:
        raise UsageError(f"--also: {shape!r} is not a format{did_you_mean(shape, OUTPUT_FORMATS)}")
    return shape, Path(file).expanduser()
