"""``precdoctor demo``: record a training run that goes wrong, live, and diagnose it."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from precdoctor.cli import options
from precdoctor.cli.common import say
from precdoctor.errors import UsageError

EXAMPLES = """\b
Examples:
  precdoctor demo
  precdoctor demo -o runs/demo"""


def demo(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Run directory to make; default: a temporary one.", metavar="DIR"),
    ] = None,
    force: options.ReplaceRun = False,
) -> int:
    """Train a small GPT in FP16 until it is lost, and diagnose it.

    Takes 15 to 30 seconds on two CPU cores, and uses a GPU if there is one. The script it runs is an ordinary one; its
    path is printed.
    """
    from precdoctor.diagnosis import diagnose
    from precdoctor.recording.options import RecordOptions
    from precdoctor.recording.process.launch import launch
    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.terminal import print_full
    from precdoctor.runlog import open_run

    if find_spec("torch") is None:
        raise UsageError("the demo trains a model, and this Python has no torch; type: pip install torch")
    script = Path(__file__).resolve().parent.parent / "integrations" / "demo_train.py"
    directory = output or Path(tempfile.mkdtemp(prefix="precdoctor-demo-")) / "run"
    say(f"recording: precdoctor record -o {directory} -- python {script}")
    status = launch([sys.executable, str(script)], directory, RecordOptions(), force=force)
    if status != 0:
        return status
    print_full(diagnose(open_run(directory)), make_console())
    return 0
