"""``precdoctor show``: what is in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli.common import EngineOption, destination, opened
from precdoctor.cli.values import choice, parse_count
from precdoctor.errors import UsageError

_EXAMPLES = """\b
Examples:
  precdoctor show
  precdoctor show runs/a --top 20
  precdoctor show runs/a --dtypes
  precdoctor show runs/a --scans
  precdoctor show runs/a --output-format json"""


def register(app: typer.Typer) -> None:
    """Adds the command to the program."""
    app.command("show", epilog=_EXAMPLES)(show)


def show(
    run: Annotated[Path | None, typer.Argument(help="Run directory; default: the newest one.", metavar="[RUN]")] = None,
    top: Annotated[str, typer.Option(help="How many tensors per table.", metavar="N")] = "10",
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="Which op computed in which dtypes, in which module.")
    ] = False,
    scans: Annotated[bool, typer.Option("--scans", help="Which steps were scanned op by op, and why.")] = False,
    output_format: Annotated[str, typer.Option(help="full or json.", metavar="FORMAT")] = "full",
    engine: EngineOption = None,
) -> int:
    """Show what is in a run.

    What was recorded and how, the tensors nearest to trouble, the timeline.
    """
    try:
        shape, count = choice("full", "json")(output_format), parse_count(top)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if dtypes and scans:
        raise UsageError("--dtypes cannot be combined with --scans")
    if dtypes:
        return _show_dtypes(run, shape)
    if scans:
        return _show_scans(run, shape)
    from precdoctor.reporting.summary import summarise

    summary = summarise(opened(run, engine), top=count)
    with destination(None, force=False) as stream:
        if shape == "json":
            from precdoctor.diagnosis.claims.finding import jsonable
            from precdoctor.reporting.json_report import dumps

            stream.write(dumps({"schema_version": 1, **jsonable(summary)}))
        else:
            from precdoctor.reporting.console import make_console
            from precdoctor.reporting.show_view import print_summary

            print_summary(summary, make_console(stream))
    return 0


def _show_dtypes(run: Path | None, shape: str) -> int:
    """What deep scans saw of ops and their dtypes."""
    from precdoctor.diagnosis.survey.op_dtypes import op_dtypes
    from precdoctor.diagnosis.survey.view import RunView

    entries = op_dtypes(RunView(opened(run)))
    with destination(None, force=False) as stream:
        if shape == "json":
            from precdoctor.diagnosis.claims.finding import jsonable
            from precdoctor.reporting.json_report import dumps

            stream.write(dumps({"schema_version": 1, "ops": jsonable(entries)}))
        else:
            from precdoctor.reporting.console import make_console
            from precdoctor.reporting.dtypes_view import print_dtypes

            print_dtypes(entries, make_console(stream))
    return 0


def _show_scans(run: Path | None, shape: str) -> int:
    """Which steps were scanned, and why."""
    from precdoctor.diagnosis.survey.scans import scans
    from precdoctor.diagnosis.survey.view import RunView

    found = scans(RunView(opened(run)))
    with destination(None, force=False) as stream:
        if shape == "json":
            from precdoctor.diagnosis.claims.finding import jsonable
            from precdoctor.reporting.json_report import dumps

            stream.write(dumps({"schema_version": 1, "scans": jsonable(found)}))
        else:
            from precdoctor.reporting.console import make_console
            from precdoctor.reporting.scans_view import print_scans

            print_scans(found, make_console(stream))
    return 0
