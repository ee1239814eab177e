"""What a diagnosis is made of: plain values that every reporter, gate and test reads, and nothing else computes."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final

#: How the path of a file of an installed package begins.
_PACKAGES: Final = re.compile(r".*/(?:site|dist)-packages/")


class Severity(str, enum.Enum):
    """How bad it is; the order of definition is the order of weight."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """3 for an error, 2 for a warning, 1 for information."""
        return {"error": 3, "warning": 2, "info": 1}[self.value]


class Phase(str, enum.Enum):
    """Where in a training step."""

    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Status(str, enum.Enum):
    """What a rule came to."""

    PASSED = "passed"
    FAILED = "failed"
    INDETERMINATE = "indeterminate"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True)
class Source:
    """A line of the user's code; ``code`` is null when the log was recorded with ``--redact-names``."""

    file: str
    line: int
    code: str | None = None

    @classmethod
    def read(cls, file: str, line: int, code: str) -> Source:
        """As a log holds it; a file of an installed package by the name it is imported under."""
        return cls(_PACKAGES.split(file)[-1] or file, line, code or None)


def is_of_library(file: str) -> bool:
    """Whether a file as a log names it is one of an installed package, which nobody edits."""
    return _PACKAGES.match(file) is not None


def at_line(source: Source | None) -> str:
    """`` at train.py:12``; empty if the line is unknown."""
    return f" at {source.file}:{source.line}" if source is not None else ""


@dataclass(frozen=True)
class Location:
    """Where a finding happened. ``module`` is the FQN below ``root``; null when it is not about one module."""

    root: str | None = None
    module: str | None = None
    module_class: str | None = None
    kind: str | None = None
    phase: Phase | None = None
    rank: int | None = None
    step: int | None = None
    op: str | None = None
    source: Source | None = None
    #: The rank's place in a parallel layout, by dimension; ``stage`` is that of a pipeline.
    coordinates: Mapping[str, int] | None = None
    #: Which of the processes that had this rank; null where there was but one.
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
    """A rank and its place in the parallel layout: ``rank 5 (tp rank 1, stage 2)``."""
    parts = [f"stage {at}" if name == "stage" else f"{name} rank {at}" for name, at in (coordinates or {}).items()]
    return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"


@dataclass(frozen=True)
class Prescription:
    """A change, what the log predicts it would do, and the lines to paste."""

    title: str
    change: Mapping[str, Any]
    predicted: Mapping[str, Any]
    snippet: str


@dataclass(frozen=True)
class Finding:
    """A claim with evidence.

    ``evidence`` holds the measured values against their limits. Two keys have a fixed shape, for the reporters:
    ``range`` (``dtype, amax, amin_nonzero, exp_lo, exp_hist``: the tensor's exponents, drawn as a bar) and ``path``
    (a list of ``{module, kind, name, dtype, order, amax, headroom_binades, nan, inf}``: the tensors in execution order
    that lead to it, the last one being the finding's own). Where several optimizers step, or one that had made steps
    before the run, ``own_steps`` says of the finding's step and of the one to resume from whose it is, and how many of
    that optimizer came before (``{step, optimizer, number}``).
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
        """A checkpoint at or before this step is sound; None where there is nothing to go back from, or to."""
        finite, off = self.evidence.get("last_finite_step"), self.evidence.get("left_its_course_at")
        steps = [int(finite)] if isinstance(finite, Integral) else []
        steps += [int(off) - 1] if isinstance(off, Integral) else []
        return None if self.evidence.get("recovered") or not steps or min(steps) < 0 else min(steps)

    def step_words(self, step: int) -> str:
        """``step 120``; where several optimizers step, or one was resumed, ``step 120 (step 60 of SGD#0)``."""
        own = next((o for o in self.evidence.get("own_steps", ()) if o["step"] == step), None)
        return f"step {step}" if own is None else f"step {step} (step {own['number']} of {own['optimizer']})"

    @property
    def resume_words(self) -> str:
        """``from a checkpoint at or before step 119``; empty where there is none."""
        step = self.resume_step
        return "" if step is None else f"from a checkpoint at or before {self.step_words(step)}"


@dataclass(frozen=True)
class RuleOutcome:
    """What one rule came to, and why: for a pass, what it looked at; else what was missing or found."""

    code: str
    name: str
    status: Status
    reason: str
    #: The rule failed with an exception: a defect of precdoctor, after which no verdict can be trusted.
    defect: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Everything a reporter needs: findings, most important first, and what was checked."""

    run: Mapping[str, Any]
    findings: Sequence[Finding]
    rules: Sequence[RuleOutcome]
    recorder: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """``findings`` if any is at warning or above, ``indeterminate`` if a rule lacked its data, or ``clean``."""
        if any(f.severity.weight >= Severity.WARNING.weight for f in self.findings):
            return "findings"
        if any(r.status is Status.INDETERMINATE for r in self.rules):
            return "indeterminate"
        return "clean"


def jsonable(value: Any) -> Any:
    """``value`` as JSON can hold it: non-finite numbers become the strings "NaN", "Infinity", "-Infinity".

    Dataclasses become objects, enums their values, NumPy scalars and arrays plain numbers and lists.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return {name: jsonable(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number
