"""The values of a diagnosis: findings, their locations and prescriptions, and the outcome of each rule.

Made by rules and the engine, read by reporters, gates and tests.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final

#: How the path of a file of an installed package begins.
_PACKAGES: Final = re.compile(r".*/(?:site|dist)-packages/")


class Severity(str, enum.Enum):
    """Severity of a finding, the most severe first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """3 for an error, 2 for a warning, 1 for information."""
        return {"error": 3, "warning": 2, "info": 1}[self.value]


class Phase(str, enum.Enum):
    """Phase of a training step."""

    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Status(str, enum.Enum):
    """The outcome of a rule."""

    PASSED = "passed"
    FAILED = "failed"
    INDETERMINATE = "indeterminate"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True)
class Source:
    """A source line; ``code`` is None if the log was recorded with ``--redact-names``."""

    file: str
    line: int
    code: str | None = None

    @property
    def place(self) -> str:
        """``train.py:12``."""
        return f"{self.file}:{self.line}"

    @classmethod
    def read(cls, file: str, line: int, code: str) -> Source:
        """Build a source from a log's fields; the path of an installed package is cut to begin below site-packages."""
        return cls(_PACKAGES.split(file)[-1] or file, line, code or None)


def is_of_library(file: str) -> bool:
    """Return whether a path in a log is in an installed package, which users do not edit."""
    return _PACKAGES.match(file) is not None


def at_line(source: Source | None) -> str:
    """Return `` at train.py:12``; empty if the line is unknown."""
    return f" at {source.place}" if source is not None else ""


def change_line(source: Source | None, caller: Source | None, *, in_library: bool) -> str:
    """Return the place for a change: `` at train.py:12``, or `` around the call at train.py:9`` of a library's line."""
    if source is None or not in_library:
        return at_line(source)
    return f" around the call{at_line(caller)}" if caller else f" around the call that leads to{at_line(source)[3:]}"


def library_words(source: Source, caller: Source | None) -> str:
    """Return a sentence: the line is in a library, and the last line of the user's code that led there, if known."""
    behind = f"; the last line of yours that led there is {caller.place}" if caller is not None else ""
    return f" {source.file} is part of a library{behind}."


@dataclass(frozen=True)
class Location:
    """The place of a finding. ``module`` is the FQN below ``root``; None if the finding is not about one module."""

    root: str | None = None
    module: str | None = None
    module_class: str | None = None
    kind: str | None = None
    phase: Phase | None = None
    rank: int | None = None
    step: int | None = None
    op: str | None = None
    source: Source | None = None
    #: The rank's mesh coordinates by dimension; ``stage`` is that of a pipeline.
    coordinates: Mapping[str, int] | None = None
    #: How often the rank had been restarted; None if the rank had only one process.
    attempt: int | None = None

    @property
    def rank_place(self) -> str:
        """``rank 5 (tp rank 1, stage 2)``, ``rank 0 attempt 1``; empty without a rank."""
        if self.rank is None:
            return ""
        return rank_place(self.rank, self.coordinates) + (
            f" attempt {self.attempt}" if self.attempt is not None else ""
        )


def rank_place(rank: int, coordinates: Mapping[str, int] | None) -> str:
    """Return a rank with its mesh coordinates in words: ``rank 5 (tp rank 1, stage 2)``."""
    parts = [f"stage {at}" if name == "stage" else f"{name} rank {at}" for name, at in (coordinates or {}).items()]
    return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"


@dataclass(frozen=True)
class Prescription:
    """A proposed change, its effect predicted from the log, and the lines to paste."""

    title: str
    change: Mapping[str, Any]
    predicted: Mapping[str, Any]
    snippet: str


@dataclass(frozen=True)
class Finding:
    """A claim with evidence.

    ``evidence`` holds the measured values and their limits. Three keys have a fixed shape, for the reporters:

    - ``range``: ``dtype, amax, amin_nonzero, exp_lo, exp_hist`` of the tensor, whose exponents are drawn as a bar.
    - ``path``: the tensors in execution order up to the finding's own, which is the last; a list of ``{module, kind,
      name, dtype, order, amax, headroom_binades, nan, inf}``.
    - ``own_steps``: only if several optimizers step, or one had made steps before the run. For the finding's step and
      the step to resume from: the optimizer, and how many steps it had made (``{step, optimizer, number}``).
    """

    code: str
    name: str
    severity: Severity
    confidence: float
    title: str
    message: str
    location: Location
    cause: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    prescriptions: Sequence[Prescription] = ()

    @property
    def resume_step(self) -> int | None:
        """The last step whose checkpoint is sound; None if the run recovered, or if no such step is known."""
        finite, off = self.evidence.get("last_finite_step"), self.evidence.get("left_its_course_at")
        steps = [int(finite)] if isinstance(finite, Integral) else []
        steps += [int(off) - 1] if isinstance(off, Integral) else []
        return None if self.evidence.get("recovered") or not steps or min(steps) < 0 else min(steps)

    def step_words(self, step: int) -> str:
        """Return ``step 120``, or with an entry in ``own_steps``: ``step 120 (step 60 of SGD#0)``."""
        own = next((o for o in self.evidence.get("own_steps", ()) if o["step"] == step), None)
        return f"step {step}" if own is None else f"step {step} (step {own['number']} of {own['optimizer']})"

    @property
    def resume_words(self) -> str:
        """``from a checkpoint at or before step 119``; empty without a :attr:`resume_step`."""
        step = self.resume_step
        return "" if step is None else f"from a checkpoint at or before {self.step_words(step)}"


@dataclass(frozen=True)
class RuleOutcome:
    """The outcome of one rule; ``reason`` says what it checked, what it found, or what data are missing."""

    code: str
    name: str
    status: Status
    reason: str
    #: Whether the rule raised an exception: a defect of precdoctor, after which no verdict can be trusted.
    defect: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The result of all rules on a run: findings, most important first; outcomes of all rules; facts for reports."""

    run: Mapping[str, Any]
    findings: Sequence[Finding]
    rules: Sequence[RuleOutcome]
    recorder: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """``findings`` if any is a warning or error, else ``indeterminate`` if a rule lacked data, else ``clean``."""
        if any(f.severity.weight >= Severity.WARNING.weight for f in self.findings):
            return "findings"
        if any(r.status is Status.INDETERMINATE for r in self.rules):
            return "indeterminate"
        return "clean"
