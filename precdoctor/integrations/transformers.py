"""Recording what ``transformers.Trainer`` trains: ``Trainer(..., callbacks=[PrecdoctorCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from precdoctor.integrations.block import RecordingCallback


class PrecdoctorCallback(RecordingCallback, TrainerCallback):
    """Records from the first to the last training step; a resumed training continues its step numbers.

    The Trainer has no hook for a training that fails: its log is closed at the end of the process, or when the next
    training begins.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self.begin_recording(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self.end_recording()
