"""A recording that begins and ends by calls, for trainers that offer hooks instead of a block of code."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from precdoctor.recording.options import RUN_VARIABLE
from precdoctor.recording.session import Recording, record


class RecordingCallback:
    """The common part of both callbacks: :func:`precdoctor.record`, begun and ended by the trainer.

    Under ``precdoctor record`` the whole process is recorded already, and both calls do nothing.

    Args:
        run: the run directory to create; by default a new one under ``precdoctor-runs`` for each training.
        force: replace an existing run directory.
        options: as for :func:`precdoctor.record`, such as ``every`` or ``include``.

    Attributes:
        run: directory of the newest recording; None before the first.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, *, force: bool = False, **options: Any) -> None:
        super().__init__()
        self.run: Path | None = None
        self._run, self._force, self._options = run, force, options
        self._open: AbstractContextManager[Recording] | None = None

    def begin_recording(self, first_step: int) -> None:
        """Begin recording; first end the recording of a training that never reached its end hook.

        Args:
            first_step: number of steps the trainer has already done, if it resumes.

        Raises:
            UsageError, RunExistsError: as :func:`precdoctor.record`.
        """
        self.end_recording()
        if os.environ.get(RUN_VARIABLE):
            self.run = Path(os.environ[RUN_VARIABLE])
            return
        options = {"first_step": first_step, **self._options}
        block = record(self._run, force=self._force, **options)
        self.run = block.__enter__().path
        self._open = block

    def end_recording(self) -> None:
        """Close the log; a second call does nothing."""
        block, self._open = self._open, None
        if block is not None:
            block.__exit__(None, None, None)
