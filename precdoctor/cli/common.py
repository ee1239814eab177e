"""What several commands share: finding the run, and putting a report where it was asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from precdoctor.errors import RunExistsError, UsageError

if TYPE_CHECKING:
    from precdoctor.cli.config import Settings
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
    from precdoctor.cli.progress import Progress
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
        blank = file.is_file() and file.stat().st_size == 0
        with file.open("w" if force or blank else "x", encoding="utf-8", errors="backslashreplace") as stream:
            yield stream
    except FileExistsError:
        raise RunExistsError(f"{file} is already there; give another name, or --force to replace it") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    say(f"Wrote {file}")


def rule_options(settings: Settings) -> dict[str, dict[str, Any]]:
    """The rule options of the settings file without those of the gate's regressions, which only the gate knows."""
    from precdoctor.comparison.regressions import REGRESSIONS

    regressions = {name for r in REGRESSIONS for name in (r.code, r.name)}
    return {code: options for code, options in settings.rules.items() if code not in regressions}
