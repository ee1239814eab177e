"""``precdoctor report``: write a run's report as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import is_stream, opened, rule_options, say, settings_in_force
from precdoctor.errors import RunExistsError, UsageError

EXAMPLES = """\b
Examples:
  precdoctor report
  precdoctor report precdoctor-runs/train-20260101T120000Z-4242 -o run.html
  precdoctor report runs/fp16 --against runs/bf16
  precdoctor report runs/a -o - > a.html"""


def report(
    run: options.NewestRun = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write to this file, - for stdout; default: the run's name and .html, in the current directory.",
            metavar="FILE",
        ),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Overlay a second run in another colour.", metavar="RUN")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file even if it is not a report.")] = False,
    engine: options.Engine = None,
) -> int:
    """Write a run's numerics as one HTML file.

    Findings with their evidence, the range map of every layer against any format and scale, timelines, underflow,
    headroom, lost updates. The file works offline, loads nothing and can be sent as it is. An earlier report of that
    name is replaced; any other file is not.
    """
    from precdoctor.reporting.html.page import render
    from precdoctor.runlog import open_run

    options = rule_options(settings_in_force())
    recorded = opened(run, engine)
    page = render(recorded, None if against is None else open_run(against), options=options)
    if output is not None and str(output) == "-":
        sys.stdout.write(page)
        return 0
    file = Path(f"{recorded.path.resolve().name}.html") if output is None else output
    write(page, file, force=force)
    say(f"Wrote {file} ({len(page.encode()) / 1000:,.0f} kB)")
    return 0


def write(page: str, file: Path, *, force: bool) -> None:
    """Write the page to ``file`` atomically. If ``file`` is a link, its target is replaced.

    Raises:
        RunExistsError: ``file`` exists, is not a report, and ``force`` is not given.
        UsageError: the file cannot be written.
    """
    from precdoctor.runlog.atomic import write_atomically

    if file.is_dir():
        raise UsageError(f"{file} is a directory; name a file in it, such as -o {file / 'report.html'}")
    try:
        if is_stream(file):
            file.write_text(page, encoding="utf-8")
            return
        if file.exists() and not force and not is_report(file):
            raise RunExistsError(f"{file} is already there; give another name, or --force to replace it")
        write_atomically(file.resolve(), page.encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name another place with -o FILE") from None


def is_report(file: Path) -> bool:
    """Return whether `precdoctor report` wrote the file."""
    from precdoctor.reporting.html.page import MARK

    with file.open("rb") as stream:
        return stream.read(len(MARK)) == MARK.encode()
