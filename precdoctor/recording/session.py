"""``with precdoctor.record(...)``: recording a block of this process, for notebooks, tests and trainers."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precdoctor.errors import UsageError
from precdoctor.recording.options import RUN_VARIABLE, RecordOptions
from precdoctor.recording.process.launch import default_run_directory, run_facts

if TYPE_CHECKING:
    from precdoctor.runlog import Run


#: Options only for the command: ``apply`` must be there before the script begins, ``may_halt`` needs a parent process.
_COMMAND_ONLY = ("apply", "may_halt")


class Recording:
    """A recorded block, during and after it.

    Attributes:
        path: its run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Run:
        """Open the run; it is complete once the block has ended."""
        from precdoctor.runlog import open_run

        return open_run(self.path)


@contextlib.contextmanager
def record(run: str | os.PathLike[str] | None = None, *, force: bool = False, **options: Any) -> Iterator[Recording]:
    """Record the training that runs inside the block, as ``precdoctor record`` does for a whole command.

    >>> with precdoctor.record("runs/smoke", every=1) as recording:   # doctest: +SKIP
    ...     train(model, steps=50)
    >>> precdoctor.diagnose(recording.open()).findings                # doctest: +SKIP

    A process can record one block at a time, any number one after the other. The log is closed at the end of the block,
    whatever ends it. Hooks stay installed afterwards and do nothing. A distributed training is recorded as a whole, by
    ``precdoctor record -- torchrun ...``.

    Args:
        run: the run directory to make; by default a new one under ``precdoctor-runs``.
        force: replace an existing run directory.
        options: fields of :class:`~precdoctor.recording.options.RecordOptions`, such as ``every`` or ``include``.

    Raises:
        UsageError: an unknown option, a value that is not allowed, several ranks, or a process recorded already.
        RunExistsError: the directory exists and ``force`` was not given.
    """
    chosen = _options(options)
    if os.environ.get(RUN_VARIABLE):
        raise UsageError("this process already runs under `precdoctor record`; take one of the two")
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise UsageError(
            "precdoctor.record records one process; type `precdoctor record -- torchrun ...` for all ranks"
        )
    from precdoctor.recording import installation
    from precdoctor.runlog.layout import create_run

    command = [sys.executable, *sys.argv]
    now = dt.datetime.now(dt.timezone.utc)
    directory = Path(run or default_run_directory(command, now)).absolute()
    if (busy := installation.recorded_into()) is not None:
        raise UsageError(f"this process is recorded into {busy} already; end that block first")
    create_run(directory, run_facts(command, chosen, now), force=force)
    recorder = installation.begin(directory, chosen)
    try:
        yield Recording(directory)
    finally:
        recorder.end()


def _options(given: dict[str, Any]) -> RecordOptions:
    """Return the options from keyword arguments. Raises UsageError like :func:`record`."""
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    taken = [name for name in RecordOptions.__dataclass_fields__ if name not in _COMMAND_ONLY]
    if (unknown := next((name for name in fields if name not in taken), None)) is not None:
        known = ", ".join(taken)
        raise UsageError(f"precdoctor.record takes {known}; it has no option {unknown!r}")
    return RecordOptions(**fields)
