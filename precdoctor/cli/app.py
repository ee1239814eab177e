"""The program: its commands, in the order a person meets them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import precdoctor
from precdoctor.cli import (
    autopsy,
    compare,
    demo,
    diagnose,
    explain,
    export,
    formats,
    gate,
    log,
    record,
    report,
    shadow,
    show,
    trial,
    watch,
    whatif,
)
from precdoctor.runlog.caps import ANY_SIZE

_EXAMPLES = """\b
Examples:
  precdoctor record -- python train.py     run it, record its numerics
  precdoctor diagnose                      what went wrong in the newest run
  precdoctor gate RUN --baseline GOOD      the same as a verdict for CI"""

app = typer.Typer(
    name="precdoctor",
    help="Finds out why a training run went wrong numerically: NaN, overflow, underflow, lost updates.",
    epilog=_EXAMPLES,
    rich_markup_mode=None,  # plain help: quick, and no boxes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    any_size: Annotated[
        bool, typer.Option("--any-size", help="Read a log of any size; without it a very large one is refused.")
    ] = False,
) -> None:
    if any_size:
        os.environ[ANY_SIZE] = "1"
    if version:
        typer.echo(f"precdoctor {precdoctor.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


record.register(app)
diagnose.register(app)
gate.register(app)
compare.register(app)
whatif.register(app)
trial.register(app)
autopsy.register(app)
shadow.register(app)
report.register(app)
watch.register(app)
show.register(app)
explain.register(app)
formats.register(app)
export.register(app)
log.register(app)
demo.register(app)

#: What :func:`precdoctor.cli.main` runs, made once: reading the signatures of all commands takes 30 ms.
command = typer.main.get_command(app)
