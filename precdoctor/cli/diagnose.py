"""``precdoctor diagnose``: what went wrong in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli.common import opened, rule_options
from precdoctor.cli.config import Settings
from precdoctor.cli.outputs import ALSO_HELP, FORMAT_HELP, deliver

_EXAMPLES = """\b
Examples:
  precdoctor diagnose
  precdoctor diagnose precdoctor-runs/train-20260101T120000Z-4242 --select PD2
  precdoctor diagnose --output-format json -o diagnosis.json"""


def register(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command("diagnose", epilog=_EXAMPLES)(diagnose)


def diagnose(
    run: Annotated[Path | None, typer.Argument(help="Run directory; default: the newest one.", metavar="[RUN]")] = None,
    output_format: Annotated[str | None, typer.Option(help=FORMAT_HELP, metavar="FORMAT")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", metavar="FILE")
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help=ALSO_HELP, metavar="FORMAT=FILE")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace output files that are there.")] = False,
    select: Annotated[
        list[str] | None,
        typer.Option(help="Only these rules (code, name, or PD2 for a family); may be repeated.", metavar="CODE"),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Leave these rules out; may be repeated.", metavar="CODE")
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with 1 on a finding of this level (error, warning); default: never.", metavar="LEVEL"),
    ] = None,
) -> int:
    """Say what went wrong numerically, most important first.

    Names where it started, why, what to change, and what the log predicts that change to do. Exits with 0 whatever it
    finds, unless --fail-on says otherwise, and with 3 when the log supports no verdict.
    """
    from precdoctor.diagnosis import diagnose as judge
    from precdoctor.diagnosis.verdict import exit_code
    from precdoctor.reporting.outputs import Report

    settings = Settings()
    level = settings.get("diagnose", "fail-on", fail_on)
    shape = settings.get("diagnose", "output-format", output_format) or "full"
    diagnosis = judge(
        opened(run),
        select=settings.get("diagnose", "select", select) or (),
        ignore=settings.get("diagnose", "ignore", ignore) or (),
        options=rule_options(settings),
    )
    status = exit_code(diagnosis, level)
    report = Report(diagnosis, status, level)
    deliver(report, shape, output, settings.get("diagnose", "also", also) or (), force=force)
    return status
