"""``precdoctor trial``: try a precision plan on a short run, and compare it with the unchanged run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import destination, rule_options, say, say_command, settings_in_force
from precdoctor.cli.record import CommandAfterOptions
from precdoctor.cli.values import choice, parse_count, parse_percentage, read
from precdoctor.errors import INTERRUPTED, RunExistsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from precdoctor.comparison.trial import Trial
    from precdoctor.diagnosis.engine import RuleOptions
    from precdoctor.diagnosis.offline.whatif.plan_file import PlanFile

EXAMPLES = """\b
Examples:
  precdoctor whatif runs/a --plan -o plan.toml
  precdoctor trial plan.toml -- python train.py --lr 3e-4
  precdoctor trial plan.toml --steps 200 -o trials/fp8 -m project.train"""

#: Names in the output directory: the two runs, and the report.
ORIGINAL, PLANNED, REPORT = "original", "planned", "trial.json"
#: Largest ``--steps``.
_MOST_STEPS = 1000


class PlanThenCommand(CommandAfterOptions):
    """Accepts the plan before or after the options; the command comes last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = list(args)
        at, module = self.end_of_options(args, 0)
        plan = []
        if not module and at < len(args) and args[at] != "--":
            plan = [args.pop(at)]
            at, module = self.end_of_options(args, at)
        rest = args[at + 1 :] if args[at : at + 1] == ["--"] else args[at:]
        return super(CommandAfterOptions, self).parse_args(ctx, [*args[:at], "--", *plan, *rest])


def trial(
    plan: Annotated[Path, typer.Argument(help="The plan that whatif --plan -o wrote.", metavar="PLAN")],
    command: options.Command = None,
    module: options.Module = None,
    steps: Annotated[str, typer.Option(help="End each run after N optimizer steps.", metavar="N")] = "50",
    max_loss_gap: Annotated[
        str, typer.Option(help="Share of the loss by which the plan may raise it.", metavar="PERCENT")
    ] = "1%",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Directory for both runs and trial.json; default: in precdoctor-runs/.",
            metavar="DIR",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier trial in this directory.")] = False,
    output_format: Annotated[
        str, typer.Option("--output-format", "--format", help="full or json; default: full.", metavar="FORMAT")
    ] = "full",
    worst: Annotated[str, typer.Option(help="How many casts and modules to list.", metavar="N")] = "10",
) -> int:
    """Try a precision plan: a short training with and without it.

    Runs the command twice, one after the other, recorded, from whatever seed the script sets. In one run the operands
    of the planned modules are cast to their formats and back. Exits with 0 if the plan holds, 1 if not, 3 if it cannot
    be judged. What the command prints goes to stderr.
    """
    from precdoctor.diagnosis.offline.whatif.plan_file import load
    from precdoctor.recording.process.launch import command_line, default_run_directory

    shape = read(choice("full", "json"), output_format, "--output-format")
    count, share = read(parse_count, steps, "--steps"), read(parse_percentage, max_loss_gap, "--max-loss-gap")
    listed = read(parse_count, worst, "--worst")
    if not 1 <= count <= _MOST_STEPS:
        raise UsageError(f"--steps takes 1 to {_MOST_STEPS:,} steps, got {count}")
    tried, rules = load(plan), rule_options(settings_in_force())
    words = command_line(list(command or []), module)
    place = (output or default_run_directory(words)).absolute()
    if place.exists() and not force and any(place.iterdir() if place.is_dir() else [place]):
        raise RunExistsError(f"{place} is already there; give another name, or --force to replace it")
    statuses = _run_both(words, tried, plan, place, count, force=force)
    if INTERRUPTED in statuses:
        return INTERRUPTED
    judged = _judged_trial(tried, place, statuses, share, rules)
    return _report(*judged, place, shape, listed)


def _run_both(
    words: Sequence[str], plan: PlanFile, file: Path, place: Path, steps: int, *, force: bool
) -> tuple[int, int]:
    """Record the run with the plan, then the unchanged run; return ``(status of the unchanged run, of the other)``.

    The plan comes first, because there is nothing to compare if it cannot be applied.

    Raises:
        UsageError: the plan cannot be applied.
    """
    from precdoctor.comparison.trial import not_applied
    from precdoctor.diagnosis.engine import view_of
    from precdoctor.diagnosis.prescriptions.file import statement
    from precdoctor.diagnosis.prescriptions.prescribed import Prescribed
    from precdoctor.recording.options import RecordOptions
    from precdoctor.recording.process.launch import launch
    from precdoctor.runlog import open_run

    as_it_is = RecordOptions(every=1, deep_scan=0, max_steps=steps)
    changed = RecordOptions(every=1, deep_scan=0, max_steps=steps, apply=tuple(c.as_dict() for c in plan.changes))
    what = Prescribed("plan", "", 1.0, f"the precision plan {file}", apply=True, changes=plan.changes)
    applied = statement([what], str(file), plan.run)
    say(f"precdoctor: running {steps} steps with the plan, then without it")
    planned = launch(words, place / PLANNED, changed, force=force, applied=applied, quiet=True, aside=True)
    if planned == INTERRUPTED:
        return planned, planned
    if (why := not_applied(view_of(open_run(place / PLANNED)))) is not None:
        raise UsageError(why)
    original = launch(words, place / ORIGINAL, as_it_is, force=force, quiet=True, aside=True)
    return original, planned


def _judged_trial(
    plan: PlanFile, place: Path, statuses: tuple[int, int], share: float, rules: RuleOptions
) -> tuple[Trial, dict[str, Any]]:
    """``(trial, descriptions of its two runs)``; NothingRecordedError if the unchanged run failed."""
    from precdoctor.comparison.trial import judge_trial
    from precdoctor.diagnosis.engine import describe, view_of
    from precdoctor.errors import NothingRecordedError
    from precdoctor.recording.process.attach import STOPPED_BY_US
    from precdoctor.runlog import open_run

    original, planned = statuses
    if original not in (0, STOPPED_BY_US):
        raise NothingRecordedError(f"the training ended with status {original} without the plan as well; mend it first")
    before, after = (view_of(open_run(place / name)) for name in (ORIGINAL, PLANNED))
    ended = None if planned in (0, STOPPED_BY_US) else f"ended with status {planned}"
    trial = judge_trial(plan, before, after, share, rules, ended)
    return trial, {ORIGINAL: describe(before), PLANNED: describe(after)}


def _report(found: Trial, runs: dict[str, Any], place: Path, shape: str, worst: int) -> int:
    """Print the report, write it to ``trial.json`` beside the runs, and return the exit status."""
    import os
    import sys

    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.json_report import dumps
    from precdoctor.reporting.trial_view import document, print_trial
    from precdoctor.runlog.shell import quoted_path

    report = dumps(document(found, runs))
    shown = os.path.relpath(place)
    shown = str(place) if shown.startswith("..") else shown
    with destination(Path(shown) / REPORT, force=True) as stream:
        stream.write(report)
    if shape == "json":
        sys.stdout.write(report)
    else:
        print_trial(found, shown, make_console(), worst=worst)
    say("precdoctor: where the two runs part, and what moved; next, type:")
    say_command(f"precdoctor compare {quoted_path(Path(shown) / ORIGINAL)} {quoted_path(Path(shown) / PLANNED)}")
    return found.exit_code
