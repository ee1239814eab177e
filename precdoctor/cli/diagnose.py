"""``precdoctor diagnose``: what went wrong in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import deliver, destination, opened, rule_options, say, say_command, settings_in_force
from precdoctor.runlog.shell import quoted_command, quoted_path

if TYPE_CHECKING:
    from precdoctor.diagnosis.claims.finding import Diagnosis
    from precdoctor.diagnosis.survey.view import RunView

EXAMPLES = """\b
Examples:
  precdoctor diagnose
  precdoctor diagnose precdoctor-runs/train-20260101T120000Z-4242 --select PD2
  precdoctor diagnose --output-format json -o diagnosis.json
  precdoctor diagnose runs/before --prescription fix.toml"""


def diagnose(
    run: options.NewestRun = None,
    output_format: options.OutputFormat = None,
    output: options.OutputFile = None,
    also: options.Also = None,
    prescription: Annotated[
        Path | None, typer.Option(help="Write what to change to this file, for record --apply.", metavar="FILE")
    ] = None,
    force: options.ReplaceFiles = False,
    select: options.Select = None,
    ignore: options.Ignore = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every rule with what it saw.")] = False,
    fail_on: options.ExitOn = None,
    engine: options.Engine = None,
) -> int:
    """Report what went wrong numerically, most important first.

    Names where it started, why, what to change, and what the log predicts that change to do. Exits with 0 whatever it
    finds, even if the command failed, unless --fail-on is given; with 3 if the log cannot be read or holds nothing.
    """
    from precdoctor.diagnosis.engine import diagnose_view, resolve_options, view_of
    from precdoctor.diagnosis.ranking.verdict import exit_code
    from precdoctor.diagnosis.registry import select_rules
    from precdoctor.reporting.outputs import Report

    settings = settings_in_force()
    level = settings.get("diagnose", "fail-on", fail_on)
    shape = settings.get("diagnose", "output-format", output_format) or "full"
    rules = select_rules(
        settings.get("diagnose", "select", select) or (), settings.get("diagnose", "ignore", ignore) or ()
    )
    thresholds = resolve_options(rule_options(settings))
    view = view_of(opened(run, engine))
    diagnosis = diagnose_view(view, rules, thresholds)
    status = exit_code(diagnosis, level)
    report = Report(diagnosis, status, level, verbose=verbose)
    deliver(report, shape, output, settings.get("diagnose", "also", also) or (), force=force)
    if prescription is not None:
        _write_prescription(view, diagnosis, prescription, force=force)
    return status


def _write_prescription(view: RunView, diagnosis: Diagnosis, file: Path, *, force: bool) -> None:
    """Write the prescriptions to ``file``, and print the command that applies them."""
    from precdoctor.diagnosis.prescriptions.file import dumps
    from precdoctor.diagnosis.prescriptions.prescribed import prescribe

    prescriptions = prescribe(view, diagnosis)
    ready = [p for p in prescriptions if p.apply]
    with destination(file, force=force) as stream:
        stream.write(dumps(prescriptions, view.run.origin))
    if ready:
        say(f"{len(ready)} of {len(prescriptions)} prescriptions can be applied without an edit; next, type:")
        say_command(f"precdoctor record --apply {quoted_path(file)} -- {_command_of(view)}")
    elif prescriptions:
        say(f"none of the {len(prescriptions)} prescriptions can be applied without an edit of the script")


def _command_of(view: RunView) -> str:
    command = view.run.info.get("command")
    return quoted_command(map(str, command)) if isinstance(command, list) and command else "python train.py"
