"""``precdoctor watch``: show a run on the terminal while it trains."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import opened, say, say_command
from precdoctor.errors import UsageError
from precdoctor.runlog.shell import quoted_path

#: Default interval in seconds, on a terminal and into a pipe.
_LIVE, _PIPED = 1.0, 10.0

EXAMPLES = """\b
Examples:
  precdoctor watch
  precdoctor watch precdoctor-runs/train-20260101T120000Z-4242
  precdoctor watch runs/a --interval 60 > progress.txt"""


def watch(
    run: options.NewestRun = None,
    interval: Annotated[
        str | None,
        typer.Option(help="Seconds between two looks; default: 1 on a terminal, 10 otherwise.", metavar="SECONDS"),
    ] = None,
) -> int:
    """Watch a run while it trains.

    Loss, gradient norm and loss scale, the tensors nearest to the ends of their formats, findings as they appear. Press
    q to quit; the run goes on. Without a terminal it prints a line per interval, until the run is over.
    """
    live = sys.stdout.isatty()
    seconds = (_LIVE if live else _PIPED) if interval is None else parse_interval(interval)
    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.live.check import Check
    from precdoctor.reporting.live.loop import key_presses, print_lines, show_live
    from precdoctor.reporting.live.watcher import Watcher

    path = opened(run).path
    watcher, check = Watcher(path), Check(path)
    console = make_console(sys.stdout)
    try:
        if live and not console.is_dumb_terminal:
            console.file = sys.stdout  # the filter of make_console drops the blanks that overwrite a screen
            with key_presses() as keys:
                show_live(watcher, check, console, keys, seconds)
            say(f"watched {path}: {watcher.phase.value}; next, type:")
            say_command(f"precdoctor diagnose {quoted_path(path)}")
        else:
            print_lines(watcher, check, console, seconds)
    finally:
        check.stop()
    return 0


def parse_interval(raw: str) -> float:
    """Parse the seconds of ``--interval``, from 0.1 to a day.

    Raises:
        UsageError: ``raw`` is no such number.
    """
    try:
        seconds = float(raw)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise UsageError(f"--interval takes seconds from 0.1 to 86400, such as 5; got {raw!r}")
    return seconds
