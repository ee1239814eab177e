"""All changes of one process, installed in two halves around the recorder's own hooks."""

from __future__ import annotations

from precdoctor.recording.applying import flag_changes, optimizer_changes, scaler_changes
from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.applying.module_changes import ModuleFormats
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import SETTINGS, Change


class Applier:
    """Makes the changes of ``--apply``."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._changes = [Change.of(raw, "PRECDOCTOR_OPTIONS") for raw in context.options.apply]
        self._ledger = Ledger(context, self._changes)
        self._masters = [
            optimizer_changes.MasterWeights(c, self._ledger)
            for c in self._changes
            if c.setting == "optimizer.master_weights"
        ]

    def install_before(self) -> None:
        """What has to be in place before the recorder's hooks: they are to see the training as it was changed."""
        flag_changes.install_flags(self._of("flag."), self._ledger, self._context)
        scaler_changes.install(self._of("scaler."), self._ledger)
        for change in self._of("autocast."):
            flag_changes.install_autocast(change, self._ledger)
        for change in self._of("optimizer.eps"):
            optimizer_changes.install_eps(change, self._ledger)
        if modules := self._of("module."):
            ModuleFormats(self._context, modules, self._ledger).install()
        for masters in self._masters:
            masters.install_before()
        for change in (c for c in self._changes if SETTINGS[c.setting].warns):
            self._ledger.refused(change, "the order of calls is the script's: call scaler.unscale_(optimizer) first")

    def install_after(self) -> None:
        """What has to come after them."""
        for masters in self._masters:
            masters.install_after()

    def _of(self, prefix: str) -> list[Change]:
        return [c for c in self._changes if c.setting.startswith(prefix)]
