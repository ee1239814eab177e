"""The Typer application: registers the commands, in the order in which ``--help`` lists them."""

from __future__ import annotations

import os
from typing import Annotated, Any

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


_COMMAND_LAST = {"allow_interspersed_args": False}
#: Commands with their own parsing of positional arguments.
_PARSING: dict[str, dict[str, Any]] = {
    "record": {"cls": record.CommandAfterOptions, "context_settings": _COMMAND_LAST},
    "trial": {"cls": trial.PlanThenCommand, "context_settings": _COMMAND_LAST},
    "shadow": {"cls": record.CommandAfterOptions, "context_settings": _COMMAND_LAST},
    "formats": {"context_settings": {"ignore_unknown_options": True}},  # -0.1 is a number here, not an option
}
for module in (
    *(record, diagnose, gate, compare, whatif, trial, autopsy, shadow),
    *(report, watch, show, explain, formats, export, demo),
):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog=module.EXAMPLES, **_PARSING.get(name, {}))(getattr(module, name))
app.add_typer(log.group, name="log")

#: The click command that :func:`precdoctor.cli.main` runs; made once, because reading all signatures takes 30 ms.
command = typer.main.get_command(app)
