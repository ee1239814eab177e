"""``precdoctor log``: check a run directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

group = typer.Typer(
    help="Check a run directory.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@group.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@group.command("verify", epilog="\b\nExamples:\n  precdoctor log verify runs/a")
def verify(run: Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN")]) -> int:
    """Check every part against its checksum, and report what is missing.

    Exits with 0 when the log is whole and with 3 when something in it cannot be trusted.
    """
    from precdoctor.cli.common import Progress
    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.log_view import print_verification
    from precdoctor.runlog.verify import verify as check

    verification = check(run, Progress(sys.stderr)) if sys.stderr.isatty() else check(run)
    print_verification(verification, make_console())
    return 0 if verification.ok else 3
