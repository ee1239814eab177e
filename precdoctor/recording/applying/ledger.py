"""Prints each change once and logs it; reports changes that could not be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import Change, Value

#: Modules and optimizers named at most, per change: a loss module created anew each step would never end.
_MAX_NOTED = 16


class Ledger:
    """The changes of one process, made and refused.

    Nothing is printed before the process trains, because launchers and data loaders also import torch.
    """

    def __init__(self, context: StepContext, changes: Sequence[Change]) -> None:
        self._context = context
        self._changes = tuple(changes)
        self._noted: set[tuple[Change, str]] = set()
        self._names: Counter[Change] = Counter()
        self._refused: set[tuple[Change, str]] = set()
        self._pending: dict[Change, str] = {}
        self._unprinted: list[str] = []
        context.when_armed.append(self._armed)
        context.when_closing.append(self._closing)

    def done(self, change: Change, what: str, was: Value | None) -> None:
        """Report that a change was made.

        Args:
            what: the changed object, in words: ``GradScaler``, or a module's FQN in backticks.
            was: the former value.
        """
        if (change, what) in self._noted:
            return
        self._noted.add((change, what))
        self._names[change] += 1
        if self._names[change] > _MAX_NOTED:
            return
        self._event(change, done=True, what=what, was=was)
        before = "" if was is None else f"{_words(was)} -> "
        self._say(f"applied {change.setting} {before}{_words(change.to)} ({what})")

    def pending(self, change: Change, why: str) -> None:
        """Note that a change has found its object; ``why`` is reported if it was not made by the end."""
        self._pending[change] = why

    def refused(self, change: Change, why: str) -> None:
        """Report that a change was not made; ``why`` is a clause that follows "because"."""
        if (change, why) not in self._refused:
            self._refused.add((change, why))
            self._event(change, done=False, why=why)
            self._say(f"not applied: {change.setting} {_words(change.to)} ({change.where}), because {why}")

    def _event(self, change: Change, *, done: bool, **data: object) -> None:
        place = {"root": change.root, "module": change.module} if change.of_module else {}
        row = {"setting": change.setting, "to": change.to, "done": done, **data}
        self._context.event("applied", **place, data=row)

    def _say(self, message: str) -> None:
        if self._context.state == "idle":
            self._unprinted.append(message)
        elif attach.global_rank() == 0:
            attach.say(message)

    def _armed(self) -> None:
        unsaid, self._unprinted = self._unprinted, []
        for message in unsaid:
            self._say(message)

    def _closing(self) -> None:
        """Report the changes that have never found their object."""
        met = {change for change, _ in (*self._noted, *self._refused)}
        for change in self._changes:
            if change not in met:
                missed = _WHY_MISSED.get(change.setting.partition(".")[0], "nothing it is about was met")
                self.refused(change, self._pending.get(change, missed))


_WHY_MISSED = {
    "module": "the training has no module of this name",
    "autocast": "no autocast region asked for float16",
    "scaler": "the training made no GradScaler",
    "optimizer": "no optimizer has what it changes",
}


def _words(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
