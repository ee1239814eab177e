"""Decides which steps of a process are scanned, and logs the facts that a scan has found."""

from __future__ import annotations

import time
from typing import Any

from precdoctor.recording import kernels
from precdoctor.recording.deepscan.scan_mode import ScanMode
from precdoctor.recording.deepscan.schedule import Schedule
from precdoctor.recording.deepscan.targets import Targets
from precdoctor.recording.deepscan.window_mode import WindowMode
from precdoctor.recording.output.evidence import Evidence
from precdoctor.recording.process import attach, memory_limits
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.recording.slots.step_batch import StepFacts


class DeepScan:
    """Provides a :class:`~precdoctor.recording.deepscan.window.StepWindow` with a mode for each step to be scanned."""

    without_modules = False

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.forget()

    def forget(self) -> None:
        """Reset everything, and read the options anew."""
        self.schedule = Schedule(self._context.options)
        #: Whether no step will be scanned at all.
        self.off = self.schedule.off
        self._began = time.perf_counter_ns()
        #: The last step for which the schedule was asked.
        self._asked_step: int | None = None
        self._refused: set[str] = set()
        self._coverage: frozenset[Any] = frozenset()
        self._number = 0
        self._cost_ns = 0
        #: Whether another scan is owed because the gradients of the last scanned step trained nothing; the latest step.
        self._owed = False
        self._before: StepFacts | None = None

    def mode(self, step: int) -> WindowMode | None:
        """Return a new scan mode if the step is to be scanned, else None."""
        if evidence := self._context.evidence:
            while evidence:  # the drain thread found it in the rows that it wrote
                self.schedule.arm(evidence.popleft())
        elif self._asked_step == step:
            return None
        if self._owed:
            self._arm_owed_scan()
        self._asked_step, elapsed = step, time.perf_counter_ns() - self._began
        if not self.schedule.wants(step, spent_ns=self._cost_ns, elapsed_ns=elapsed):
            return None
        options = self._context.options
        return ScanMode(
            memory_limits.for_copies(options),
            values=not options.redact_names,
            targets=Targets(self._context.names, threads=self._context.threads),
        )

    def refused(self, root: str, why: str) -> None:
        """Log why a step was not scanned, once per reason."""
        if why not in self._refused:
            self._refused.add(why)
            self._context.event("scan", root=root, data={"kind": "step", "outcome": "refused", "why": why})

    def suspect(self) -> None:
        """Note as evidence that two steps in a row were discarded."""
        self.schedule.arm(Evidence("discarded", self._context.step))

    def _arm_owed_scan(self) -> None:
        """Schedule the scan that is owed once a step's gradients were used: loss scales often begin too large."""
        before, self._before = self._before, self._context.current
        if before is not None and not (before.bad or before.left_out):
            self.schedule.make_up()
            self._owed = False

    def ended(self, mode: WindowMode) -> None:
        """Log what the scan has found: the step is over."""
        assert isinstance(mode, ScanMode), "made here"
        if not (mode.ops or mode.failure):
            return
        context = self._context
        self._cost_ns += mode.spent_ns
        self._owed, self._before = context.current.bad or context.current.left_out, None
        number = f"{attach.global_rank()}-s{self._number}"
        self._number += 1
        if mode.failure is not None:
            why = f"{type(mode.failure).__name__}: {mode.failure}"[:500]
            context.event("warning", data={"message": f"the deep scan of step {context.step} was dropped: {why}"})
            context.event("scan", id=number, data={"kind": "step", "outcome": "dropped", "why": why,
                                                         **self.schedule.why})  # fmt: skip
            return
        data = {
            "kind": "step",
            "outcome": "done",
            "ops": mode.ops,
            "complete": not mode.full,
            "micro_steps": min(context.micro_step, mode.most_micro_steps),
            "followed": mode.trails.begun,
            "lost": mode.trails.lost,
            "spent_ns": mode.spent_ns,
            **self.schedule.why,
        }
        context.event("scan", id=number, data=data)
        with kernels.apart_from_user_modes():
            rows = mode.facts(Targets(context.names, mode.optimizers, context.threads))
        self.schedule.found(context.step, {_place(row) for row in rows})
        if mode.coverage.signature != self._coverage:  # logged once as long as it stays the same
            self._coverage = mode.coverage.signature
            rows += mode.coverage.events()
        for index, row in enumerate(rows):
            context.event("scan", id=f"{number}.{index}", parent_id=number, **row)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a fact from scan to scan: its kind and place."""
    return (row["data"]["kind"], row["root"], row["module"], row["op"], row.get("file"), row.get("line"))
