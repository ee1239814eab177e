"""Recording what ``transformers.Trainer`` trains: ``Trainer(..., callbacks=[PrecdoctorCallback()])``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from precdoctor.integrations.block import Block


class PrecdoctorCallback(TrainerCallback):
    """Records from the first to the last training step; a resumed training continues its step numbers.

    The Trainer has no hook for a training that fails: its log is closed at the end of the process, or when the next
    training begins.

    Args:
        run: the run directory to create; by default a new one under ``precdoctor-runs`` for each training.
        force: replace an existing run directory.
        options: as for :func:`precdoctor.record`, such as ``every`` or ``include``.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, *, force: bool = False, **options: Any) -> None:
        self._block = Block(run, options, force=force)

    @property
    def run(self) -> Path | None:
        """The directory of the newest recording; None before the first."""
        return self._block.path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._block.begin(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._block.end()
