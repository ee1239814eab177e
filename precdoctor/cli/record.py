"""``precdoctor record``: run a training command with recording on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from precdoctor.cli import options
from precdoctor.cli.common import rule_options, settings_in_force
from precdoctor.cli.config import SETTINGS, Settings
from precdoctor.cli.values import parse_list
from precdoctor.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from precdoctor.recording.process.supervise import Online

EXAMPLES = """\b
Examples:
  precdoctor record -- python train.py --lr 3e-4
  precdoctor record -o runs/a -- torchrun --nproc-per-node 8 train.py
  precdoctor record --every 16 --steps 1000: -m project.train"""


class CommandAfterOptions(TyperCommand):
    """Parses ``-m MODULE`` as Python does: all words after it are arguments of the module."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at, module = self.end_of_options(args, 0)
        return super().parse_args(ctx, [*args[:at], "--", *args[at:]] if module else args)

    def end_of_options(self, args: list[str], at: int) -> tuple[int, bool]:
        """``(end, module)``: the index after the options that begin at ``at``, and whether the last one is ``-m``."""
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] in ("-m", "--module"):
                return at + 2, True
            at += 1 if args[at] in flags or "=" in args[at] else 2
        return at, False


def record(
    command: options.Command = None,
    module: options.Module = None,
    output: options.RunDirectory = None,
    force: options.ReplaceRun = False,
    every: Annotated[
        str | None,
        typer.Option(
            help="Full statistics on every N-th step, a power of two; default: chosen to stay within --budget.",
            metavar="N",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Recording overhead to aim at in a long run, as a share of training time; default: 1%.",
            metavar="PERCENT",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Record all ranks (the default), 0, or those in a list.", metavar="all|0|LIST")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Full statistics on these steps only, B excluded.", metavar="A:B")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only modules like this; may be repeated.", metavar="GLOB")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="No modules like this; may be repeated.", metavar="GLOB")
    ] = None,
    first_step: Annotated[
        str | None, typer.Option(help="Number of the first step, for a run that resumes; default: 0.", metavar="N")
    ] = None,
    on_nonfinite: Annotated[
        str | None,
        typer.Option(
            help="At a non-finite loss or gradient: examine (replay the step, continue; the default), stop (exit code "
            "66), skip (leave the weights alone, continue), observe (only log it; adds no device sync).",
            metavar="examine|stop|skip|observe",
        ),
    ] = None,
    autopsy: Annotated[
        bool | None,
        typer.Option("--autopsy/--no-autopsy", help="If the run becomes non-finite, run it again afterwards, traced."),
    ] = None,
    arm_next: Annotated[
        str | None,
        typer.Option(
            help="After an incident no replay explains, trace every op of the next K steps; default: 0.", metavar="K"
        ),
    ] = None,
    deep_scan: Annotated[
        str | None,
        typer.Option(
            help="Check every op of N healthy steps against FP64, or off; default: a few steps, within --budget.",
            metavar="N|off",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            help="List every op of these steps with fingerprints of its tensors, for compare --ops.", metavar="STEPS"
        ),
    ] = None,
    compiled: Annotated[
        str | None,
        typer.Option(
            help="With torch.compile: record calls of compiled models (boundary; the default), or also the modules "
            "inside (instrument; changes how they round).",
            metavar="boundary|instrument",
        ),
    ] = None,
    scene_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for a replay and for weights before the step; default: 256MiB, or 2% of a GPU for replays.",
            metavar="SIZE",
        ),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            help="Stop recording, not training, at this size per rank, such as 2GB; a number alone is bytes.",
            metavar="SIZE",
        ),
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Make the changes of a file that diagnose --prescription wrote.", metavar="FILE")
    ] = None,
    halt_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Stop the run (exit code 66) on a finding of these rules, or error for any error; default: never.",
            metavar="CODES|error",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="A known-good run; --halt-on and --on-finding compare against it.", metavar="RUN"),
    ] = None,
    on_finding: Annotated[
        str | None,
        typer.Option(help="Run this shell command for each new finding, with it as JSON on stdin.", metavar="CMD"),
    ] = None,
    inference: Annotated[
        bool | None,
        typer.Option(
            "--inference/--no-inference",
            help="Also record processes that only run models; each call of a model is one step.",
        ),
    ] = None,
    redact_names: options.RedactNames = None,
    shared: Annotated[
        bool | None,
        typer.Option("--shared/--no-shared", help="Let others read the run directory; default: only you can."),
    ] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict/--no-strict", help="Let an internal error of the recorder stop the run.")
    ] = None,
) -> int:
    """Run a training command and record its numerics.

    Your script is not modified, and training stays bitwise identical unless you pass --apply, --compiled instrument or
    --on-nonfinite skip. The exit status is the command's own.
    """
    given = locals()
    from precdoctor.recording.options import RecordOptions
    from precdoctor.recording.process.launch import command_line, launch

    settings = settings_in_force()
    taken = {field.name.replace("_", "-") for field in dataclasses.fields(RecordOptions)} - {"apply"}
    flags = {key: given[key.replace("-", "_")] for key in SETTINGS["record"] if key in taken}
    redact = bool(settings.get("record", "redact-names", redact_names))
    changes, applied = _changes(settings.get("record", "apply", apply), redact=redact)
    # both ``--halt-on PD2,PD301`` and a repeated flag
    halting = [name for text in halt_on or () for name in parse_list(text)] or settings.get("record", "halt-on") or ()
    healthy = settings.get("record", "reference", reference)
    online = _online(settings, halting, settings.get("record", "on-finding", on_finding), healthy, redact=redact)
    options = RecordOptions(**settings.chosen("record", flags), apply=changes, may_halt=bool(halting))
    arguments = list(command or [])
    if module is None and arguments[:1] == ["-m"]:  # ``-- -m MODULE`` means the same
        if len(arguments) == 1:
            raise UsageError("-m needs the name of a module, as in: precdoctor record -m project.train")
        module, arguments = arguments[1], arguments[2:]
    directory = settings.get("record", "output", output)
    words = command_line(arguments, module)
    open_to_others = bool(settings.get("record", "shared", shared))

    def start(place: Path | None) -> int:
        return launch(words, place, options, force=force, shared=open_to_others, applied=applied, online=online)

    if not settings.get("record", "autopsy", autopsy):
        return start(directory)
    return _with_autopsy(words, directory, start)


def _with_autopsy(command: list[str], directory: Path | None, start: Callable[[Path], int]) -> int:
    """Record; if something became non-finite, make a second, traced run. Return the exit status of the first run."""
    from precdoctor.cli.autopsy import second_run
    from precdoctor.cli.common import say
    from precdoctor.errors import PrecdoctorError
    from precdoctor.recording.process.launch import default_run_directory
    from precdoctor.runlog import open_run

    place = (directory or default_run_directory(command)).absolute()
    status = start(place)
    try:
        second_run(open_run(place), died=status != 0)
    except PrecdoctorError as error:  # the first run is recorded, so its status is returned
        say(f"precdoctor: no autopsy: {error}")
    return status


def _online(
    settings: Settings, halt_on: Sequence[str], command: str | None, reference: Path | None, *, redact: bool
) -> Online | None:
    """The rules to run during the recording, for --halt-on and --on-finding; None if neither is given.

    Raises:
        UsageError: --reference without either of them, or an unknown rule.
    """
    if not halt_on and command is None:
        if reference is not None:
            raise UsageError("--reference is for the rules that run meanwhile; add --halt-on CODES or --on-finding CMD")
        return None
    from precdoctor.diagnosis.engine import resolve_options
    from precdoctor.diagnosis.online import OnlineRules, as_json
    from precdoctor.recording.process.supervise import Online

    more: dict[str, Any] = {}
    if reference is not None:
        from precdoctor.comparison.leading import INDICATORS, leading_findings
        from precdoctor.diagnosis.engine import view_of
        from precdoctor.runlog import open_run

        healthy = view_of(open_run(reference))
        more = {"more": lambda view: leading_findings(healthy, view), "more_rules": INDICATORS}
    rules = OnlineRules(resolve_options(rule_options(settings)), halt_on, **more)
    return Online(
        look=lambda run, last: rules.look(run, last=last),
        halts=rules.halts,
        title=lambda finding: f"{finding.code} {finding.name if redact else finding.title}",
        to_json=as_json,
        command=command,
    )


def _changes(file: Path | None, *, redact: bool) -> tuple[tuple[dict[str, Any], ...], dict[str, Any] | None]:
    """``(changes, statement of them for run.json)`` of a prescription file; ``((), None)`` without a file."""
    if file is None:
        return (), None
    from precdoctor.diagnosis.prescriptions.file import chosen_changes, load, statement

    prescriptions, diagnosed = load(file)
    changes = chosen_changes(prescriptions, str(file))
    return tuple(c.as_dict() for c in changes), statement(prescriptions, str(file), diagnosed, redact=redact)
