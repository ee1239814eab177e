"""Helpers of several commands: messages, settings, opening a run, progress, and writing reports."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TextIO

from precdoctor.cli.values import OUTPUT_FORMATS, choice, read
from precdoctor.errors import RunExistsError, UsageError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from precdoctor.cli.config import Settings
    from precdoctor.reporting.outputs import Report
    from precdoctor.runlog import Run


def say(message: str) -> None:
    """Print a message to stderr, so that stdout holds only results."""
    from precdoctor.reporting.text import clean

    print(clean(message), file=sys.stderr)  # noqa: T201 - the program talking


def say_command(command: str) -> None:
    """Print to stderr, indented and never shortened, a command to type next; its words must be quoted already."""
    print(f"  {command}", file=sys.stderr)  # noqa: T201 - the program talking


def settings_in_force(*, whole: bool = False) -> Settings:
    """The settings of this process. Their notes and refused files are printed to stderr.

    With ``whole``, a refused file is an error, because a gate without its settings could pass a run it should fail.

    Raises:
        UsageError: as :class:`~precdoctor.cli.config.Settings`; or, with ``whole``, a file is refused.
    """
    from precdoctor.cli.config import Settings

    settings = Settings()
    if whole and settings.refused:
        raise UsageError(settings.refused[0])
    for note in (*settings.refused, *settings.notes):
        say(f"precdoctor: {note}")
    return settings


def opened(run: Path | None, engine: str | None = None) -> Run:
    """Open a run; on a terminal, reading it shows its progress.

    Args:
        run: its directory; None for the newest run, which is then named on stderr.
        engine: the value of ``--engine``.

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
    recorded = open_run(run)
    recorded.engine = checked_engine(engine)
    if sys.stderr.isatty():
        recorded.progress = Progress(sys.stderr)
    return recorded


@contextlib.contextmanager
def destination(file: Path | None, *, force: bool) -> Iterator[IO[str]]:
    """The stream to write to: stdout if ``file`` is None, else a new file, named on stderr when it is complete.

    An empty file counts as new, because CI runners create them in advance.

    Raises:
        RunExistsError: the file is not empty and ``force`` is not given.
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


class Answer(NamedTuple):
    """What a command answers: as JSON values, on a console in full or in short, as text (Markdown or TOML)."""

    document: Callable[[], dict[str, Any]]
    show: Callable[[Console], None]
    concise: Callable[[Console], None] | None = None
    text: Callable[[], str] | None = None


def write_answer(stream: IO[str], shape: str, answer: Answer) -> None:
    """Write the answer in the format ``shape``."""
    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.json_report import dumps

    if shape == "json":
        stream.write(dumps(answer.document()))
    elif shape in ("markdown", "toml") and answer.text is not None:
        stream.write(answer.text())
    else:
        (answer.concise if shape == "concise" and answer.concise is not None else answer.show)(make_console(stream))


def chosen_kinds(given: Iterable[str] | None) -> tuple[str, ...]:
    """The kinds of tensors named with ``--kind``, each once; UsageError for an unknown one."""
    from precdoctor.runlog.schema import KINDS

    return tuple(dict.fromkeys(read(choice(*KINDS), kind, "--kind") for kind in given or ()))


def is_stream(file: Path) -> bool:
    """Return whether ``file`` is a device or a pipe (``/dev/null``, ``>(less)``), to be written to, never replaced."""
    return file.exists() and not (file.is_file() or file.is_dir())


def rule_options(settings: Settings, *, of_regressions: bool = False) -> dict[str, dict[str, Any]]:
    """The options of rules in the settings file, or those of regressions: a diagnosis would refuse the others, and so
    would a comparison.
    """
    from precdoctor.comparison.regressions import REGRESSIONS

    names = {r.name for r in REGRESSIONS}
    whose = {name: name.lower().startswith("pd8") or name.lower() in names for name in settings.rules}
    return {name: options for name, options in settings.rules.items() if whose[name] is of_regressions}


#: Seconds before the first progress line, and between updates.
_DELAY, _PERIOD = 1.0, 0.2
_ERASE = "\r\x1b[2K"


class Progress:
    """A progress line on a terminal. Call it with activity, number done and total; at the total it erases the line."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + _DELAY
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
    """Write the report in every requested format.

    Args:
        shape: main output format.
        output: file for the main format; None for stdout.
        also: further reports, each as ``FORMAT=FILE``.
        force: replace existing files.

    Raises:
        UsageError: an entry of ``also`` is not FORMAT=FILE, a file occurs twice, or cannot be written.
        RunExistsError: a file exists and ``force`` is not given.
    """
    from precdoctor.reporting.outputs import WRITERS

    wanted = [(shape, output), *(_parsed_also(entry) for entry in also)]
    files = [file for _, file in wanted if file is not None]
    if (twice := next((file for file in files if files.count(file) > 1), None)) is not None:
        raise UsageError(f"two reports would be written to {twice}; give each its own file")
    # stdout last: if its reader stops (`| head`), the process ends, and the files must be complete by then
    for name, file in sorted(wanted, key=lambda w: w[1] is None):
        with destination(file, force=force) as stream:
            WRITERS[name](report, stream)


def _parsed_also(entry: str) -> tuple[str, Path]:
    shape, equals, file = entry.partition("=")
    if not equals or not file:
        raise UsageError(f"--also takes FORMAT=FILE, such as junit=precdoctor.xml, got {entry!r}")
    if shape not in OUTPUT_FORMATS:
        raise UsageError(f"--also: {shape!r} is not a format{did_you_mean(shape, OUTPUT_FORMATS)}")
    return shape, Path(file).expanduser()
