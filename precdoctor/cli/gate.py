"""``precdoctor gate``: a verdict for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli.config import Settings
from precdoctor.cli.outputs import ALSO_HELP, FORMAT_HELP, deliver

_EXAMPLES = """\b
Examples:
  precdoctor gate runs/pull-request
  precdoctor gate runs/pull-request --baseline runs/main
  precdoctor gate runs/a --output-format github --also junit=gate.xml"""


def register(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command("gate", epilog=_EXAMPLES)(gate)


def gate(
    runs: Annotated[list[Path], typer.Argument(help="Run directories to judge.", metavar="RUN...")],
    baseline: Annotated[Path | None, typer.Option(help="A healthy run to hold them against.", metavar="RUN")] = None,
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
        typer.Option(help="Fail at this level or above (error, warning); default: error.", metavar="LEVEL"),
    ] = None,
) -> int:
    """Judge runs for CI, with an exit status.

    0 passed, 1 failed, 2 used wrongly, 3 no trustworthy verdict. The rules of diagnose as pass or fail and, with
    --baseline, what got worse since then: expected, found and limit.
    """
    from precdoctor.comparison.gate import gate as judge
    from precdoctor.reporting.outputs import Report
    from precdoctor.runlog import open_run

    settings = Settings()
    base = settings.get("gate", "baseline", baseline)
    shape = settings.get("gate", "output-format", output_format) or "full"
    verdict = judge(
        [open_run(run) for run in runs],
        baseline=open_run(base) if base is not None else None,
        fail_on=settings.get("gate", "fail-on", fail_on) or "error",
        select=settings.get("gate", "select", select) or (),
        ignore=settings.get("gate", "ignore", ignore) or (),
        options=settings.rules,
    )
    report = Report(verdict.diagnosis, verdict.exit_code, verdict.fail_on, verdict)
    deliver(report, shape, output, settings.get("gate", "also", also) or (), force=force)
    return verdict.exit_code
