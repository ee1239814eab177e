"""Arguments and options that several commands share, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli.values import OUTPUT_FORMATS

NewestRun = Annotated[
    Path | None, typer.Argument(help="Run directory; default: the newest one in precdoctor-runs/.", metavar="[RUN]")
]
Command = Annotated[
    list[str] | None, typer.Argument(help="What to run: a command, or a script for this Python.", metavar="COMMAND")
]
Module = Annotated[
    str | None,
    typer.Option("-m", "--module", help="Run a module with this Python, as python -m does.", metavar="MODULE"),
]
RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", help="Run directory to make; default: a new one in precdoctor-runs/.", metavar="DIR"
    ),
]
ReplaceRun = Annotated[bool, typer.Option("--force", help="Replace the run directory if there is one.")]
RedactNames = Annotated[
    bool | None, typer.Option("--redact-names/--no-redact-names", help="Keep source text and arguments out of the log.")
]

OutputFormat = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(OUTPUT_FORMATS[:-1])} or {OUTPUT_FORMATS[-1]}; default: full.", metavar="FORMAT"),
]
FullOrJson = Annotated[str, typer.Option(help="full or json.", metavar="FORMAT")]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write to this file instead of stdout.", metavar="FILE")
]
Also = Annotated[
    list[str] | None, typer.Option(help="Write this format to FILE as well; may be repeated.", metavar="FORMAT=FILE")
]
ReplaceFiles = Annotated[bool, typer.Option("--force", help="Replace output files that are there.")]

Select = Annotated[
    list[str] | None,
    typer.Option(help="Only these rules (code, name, or PD2 for a family); may be repeated.", metavar="CODE"),
]
Ignore = Annotated[list[str] | None, typer.Option(help="Leave these rules out; may be repeated.", metavar="CODE")]
ExitOn = Annotated[
    str | None,
    typer.Option(help="Exit with 1 on a finding of this level (error, warning); default: never.", metavar="LEVEL"),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Who reads a large log: local (default), local:WORKERS, dask, or dask:ADDRESS of a scheduler.",
        metavar="ENGINE",
    ),
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(help="Tensors of this kind only, such as grad_output; may be repeated.", metavar="KIND"),
]
