"""Recording what a Lightning ``Trainer`` fits: ``Trainer(..., callbacks=[PrecdoctorCallback()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precdoctor.integrations.block import RecordingCallback

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the older name of the same package
    from pytorch_lightning.callbacks import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PrecdoctorCallback(RecordingCallback, Callback):
    """Records from the first to the last training step of a fit, however it ends; sanity checks are left out."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_recording(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end_recording()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.end_recording()
