"""``precdoctor autopsy``: run the recorded command again, with every op of the failing step traced."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import opened, say, say_command
from precdoctor.errors import NothingRecordedError, UsageError
from precdoctor.runlog.layout import launched_here
from precdoctor.runlog.shell import quoted_command, quoted_path

if TYPE_CHECKING:
    from precdoctor.diagnosis.survey.view import RunView
    from precdoctor.runlog import Run

EXAMPLES = """\b
Examples:
  precdoctor autopsy
  precdoctor autopsy runs/a
  precdoctor autopsy runs/a && precdoctor diagnose runs/a"""

#: Exit status if the failure did not recur, the second run differed from the first, or no traced op made the value.
_NO_ANSWER = 3


def autopsy(
    run: options.NewestRun = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Run the command of a log that was recorded elsewhere, without asking.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the directory and the command, and run nothing.")
    ] = False,
) -> int:
    """Run the command again, tracing every op of the bad step.

    Finds what no replay of a step reaches: loss code, optimizers, code between modules. What it finds is added to RUN,
    where diagnose reads it. The command does all it does once more (it also writes its checkpoints) up to that step,
    and is ended there.
    """
    recorded = opened(run)
    command, cwd = _command(recorded)
    if dry_run:
        print(_shell_line(command, cwd))  # noqa: T201 - what was asked for
        return 0
    if not yes and not launched_here(recorded.path, recorded.info):
        _ask(recorded, _shell_line(command, cwd))
    return second_run(recorded)


def _shell_line(command: Sequence[str], cwd: str) -> str:
    return f"cd {quoted_path(cwd)} && {quoted_command(command)}"


def _ask(run: Run, shown: str) -> None:
    """Show the command of the log, which may come from somebody else, and ask whether to run it; UsageError if not."""
    say(f"precdoctor: {run.path} was not recorded here by you, or has been moved; this would run:")
    say_command(shown)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("nothing was run, because there is no terminal to ask on; read the command, then add --yes")
    if not typer.confirm("Run it?", err=True):
        raise UsageError("nothing was run")


def second_run(run: Run, *, died: bool = True) -> int:
    """Run the command of ``run`` again, traced, and report the result; return 0, or 3 without an answer.

    Args:
        run: the first run.
        died: whether the first run may have ended inside the step to trace.

    Raises:
        UsageError: the log lacks the command, or it cannot be run again.
        NothingRecordedError: the run recorded no step, or nothing became non-finite in it.
    """
    from precdoctor.diagnosis.families.nonfinite.autopsy import agreement, plan
    from precdoctor.diagnosis.survey.view import RunView
    from precdoctor.recording.process.launch import launch
    from precdoctor.runlog import open_run
    from precdoctor.runlog.files import AUTOPSY_DIR

    view = RunView(run)
    command, cwd = _command(run)
    chosen = plan(view, died=died)
    if chosen is None:
        raise NothingRecordedError(f"nothing became non-finite in {run.path}: there is no step to trace")
    options = _options(run, chosen)
    steps = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]}-{chosen[-1]}"
    say(f"precdoctor: running {quoted_command(command)} again in {cwd}, tracing {steps}; it is ended after that")
    directory = Path(run.path).absolute() / AUTOPSY_DIR
    with _in_directory(cwd):
        launch(command, directory, options, force=True, quiet=True)
    again = RunView(open_run(directory))
    return _report(run, again, agreement(view, again, chosen[-1]), chosen)


def _report(run: Run, again: RunView, agrees: Any, chosen: range) -> int:
    shown = os.path.relpath(run.path)
    traced = [e for e in again.events_of("incident") if e["data"].get("live")]
    if not traced:
        say(f"precdoctor: the second run went well up to step {chosen[-1]}: what went wrong does not repeat itself")
        return _NO_ANSWER
    if not agrees.same:
        at = "nothing of the two could be compared" if agrees.differs_at is None else f"from step {agrees.differs_at}"
        say(
            f"precdoctor: the second run is not the first one again ({at}); seeds, data order and threads must be fixed"
        )
        return _NO_ANSWER
    same = f"the same run again ({agrees.steps} losses and {agrees.tensors} tensors equal)"
    if not any(e["data"].get("origins") for e in traced):
        say(
            f"precdoctor: {same}, but no traced op made the value: it came with the data, from code before the "
            "traced step, or from outside of torch (NumPy, another thread)"
        )
        return _NO_ANSWER
    say(f"precdoctor: {same}; next, type:")
    say_command(f"precdoctor diagnose {quoted_path(shown)}")
    return 0


def _command(run: Run) -> tuple[list[str], str]:
    """The recorded command and its working directory; UsageError if the log lacks them or the directory is gone."""
    command, cwd = run.info.get("command"), run.info.get("cwd")
    if not isinstance(command, list) or not command or not all(isinstance(c, str) for c in command):
        raise UsageError(f"{run.path} does not name the recorded command, so it cannot be run again")
    if not isinstance(cwd, str) or (run.info.get("options") or {}).get("redact_names"):
        raise UsageError(f"{run.path} was recorded with --redact-names: its command is not in the log")
    if not Path(cwd).is_dir():
        raise UsageError(f"the command was recorded in {cwd}, which no longer exists")
    return command, cwd


def _options(run: Run, chosen: range) -> Any:
    """The recorder options for the second run: those of the first run, plus the steps to trace."""
    import dataclasses
    import json

    from precdoctor.recording.options import RecordOptions

    options = RecordOptions.from_json(json.dumps(run.info.get("options") or {}))
    policy = "examine" if options.on_nonfinite == "stop" else options.on_nonfinite
    return dataclasses.replace(
        options, trace_steps=(chosen.start, chosen.stop), on_nonfinite=policy, arm_next=0, deep_scan=0, max_disk=None
    )


@contextlib.contextmanager
def _in_directory(path: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
