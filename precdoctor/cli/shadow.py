"""``precdoctor shadow``: train with a comparison to FP32 on some steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import Answer, rule_options, say, say_command, settings_in_force, write_answer
from precdoctor.cli.config import Settings
from precdoctor.cli.values import parse_count, read
from precdoctor.errors import PrecdoctorError, UsageError
from precdoctor.runlog.shell import quoted_path

if TYPE_CHECKING:
    from precdoctor.runlog import Run

EXAMPLES = """\b
Examples:
  precdoctor shadow -- python train.py --lr 3e-4
  precdoctor shadow --at 0,100 -- torchrun --nproc-per-node 2 train.py
  precdoctor shadow --reference fp64 --every 50 -m project.train"""


def shadow(
    command: options.Command = None,
    module: options.Module = None,
    output: options.RunDirectory = None,
    force: options.ReplaceRun = False,
    at: Annotated[
        str | None,
        typer.Option(help="Compare these steps, such as 0,100,1000; default: 0, 1, 4, 16, 64 ...", metavar="STEPS"),
    ] = None,
    every: Annotated[str | None, typer.Option(help="Compare every N-th step instead.", metavar="N")] = None,
    steps: Annotated[str | None, typer.Option(help="Compare none but steps A to B, B left out.", metavar="A:B")] = None,
    reference: Annotated[
        str | None, typer.Option(help="What to compare with: fp32 (default) or fp64.", metavar="fp32|fp64")
    ] = None,
    redact_names: options.RedactNames = None,
    output_format: Annotated[
        str | None, typer.Option(help="full, concise, json or markdown; default: full.", metavar="FORMAT")
    ] = None,
    worst: Annotated[str, typer.Option(help="How many pieces of code to list.", metavar="N")] = "10",
) -> int:
    """Train as always, with FP32 beside it on some steps, and compare.

    Reports which layers are further from FP32 than their format explains. If none is, precision is not the problem.
    Your script is not modified, and its training stays bitwise identical. The exit status is the command's own.
    """
    from precdoctor.recording.options import RecordOptions
    from precdoctor.recording.process.launch import command_line, default_run_directory, launch

    settings = settings_in_force()
    flags = {"at": at, "every": every, "steps": steps, "reference": reference, "redact-names": redact_names}
    chosen = settings.chosen("shadow", flags)
    if at is not None and every is not None:
        raise UsageError("--at names steps and --every counts them; give one of the two")
    count = read(parse_count, worst, "--worst")
    shape = settings.get("shadow", "output-format", output_format) or "full"
    redact = {"redact_names": chosen["redact_names"]} if "redact_names" in chosen else {}
    options = RecordOptions(
        shadow=chosen.get("reference", "fp32"),
        shadow_at=() if every is not None else chosen.get("at", ()),
        shadow_every=None if at is not None else chosen.get("every"),
        shadow_steps=chosen.get("steps", (None, None)),
        **redact,
    )
    words = command_line(list(command or []), module)
    place = settings.get("shadow", "output", output) or default_run_directory(words)
    status = launch(words, place.absolute(), options, force=force, quiet=True)
    _print_report(place.absolute(), settings, shape, count)
    return status


def _print_report(place: Path, settings: Settings, shape: str, worst: int) -> None:
    """Print the report to stdout. A failure is only a message, because the exit status is the command's."""
    import os

    from precdoctor.runlog import open_run
    from precdoctor.runlog.layout import rank_directories

    if not place.is_dir() or not rank_directories(place):
        return  # the recorder has already reported why nothing was recorded
    try:
        run = open_run(place)
        _report(run, settings, shape, worst)
    except PrecdoctorError as error:
        say(f"precdoctor: no comparison: {error}")
        return
    shown = os.path.relpath(place)
    say("precdoctor: every finding of the run, with what to change; next, type:")
    say_command(f"precdoctor diagnose {quoted_path(place if shown.startswith('..') else shown)}")


def _report(run: Run, settings: Settings, shape: str, worst: int) -> None:
    import sys
    from functools import partial

    from precdoctor.diagnosis.analyses.shadow_errors import shadowed
    from precdoctor.diagnosis.engine import describe, resolve_options, view_of
    from precdoctor.diagnosis.families.configuration.precision_error_above_expectation import RULE, limits_of
    from precdoctor.reporting import shadow_view

    limits = limits_of(resolve_options(rule_options(settings))[RULE.code])
    view = view_of(run)
    comparison, facts = shadowed(view) or shadow_view.NOTHING, describe(view)
    answer = Answer(
        partial(shadow_view.document, comparison, facts, limits),
        partial(shadow_view.print_full, comparison, facts, limits=limits, worst=worst),
        concise=partial(shadow_view.print_concise, comparison, limits=limits),
        text=partial(shadow_view.markdown, comparison, facts, limits, worst=worst),
    )
    write_answer(sys.stdout, shape, answer)
