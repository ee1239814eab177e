"""Recording what a Lightning ``Trainer`` fits: ``Trainer(..., callbacks=[PrecdoctorCallback()])``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precdoctor.integrations.block import Block

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the older name of the same package
    from pytorch_lightning.callbacks import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PrecdoctorCallback(Callback):
    """Records from the first to the last training step of a fit, however it ends; sanity checks are left out.

    Args:
        run: the run directory to create; by default a new one under ``precdoctor-runs`` for each fit.
        force: replace an existing run directory.
        options: as for :func:`precdoctor.record`, such as ``every`` or ``include``.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None, *, force: bool = False, **options: Any) -> None:
        super().__init__()
        self._block = Block(run, options, force=force)

    @property
    def run(self) -> Path | None:
        """The directory of the newest recording; None before the first."""
        return self._block.path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._block.begin(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._block.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._block.end()
