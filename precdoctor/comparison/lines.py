"""Single comparisons of a gate (expected, found, limit), and their conversion to findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import Key, grouped

#: Most subjects that the evidence of a finding lists.
_LISTED = 16
_PHASES = {
    "loss": Phase.LOSS,
    "batch": Phase.DATA,
    **dict.fromkeys(("grad_output", "weight_grad"), Phase.BACKWARD),
    **dict.fromkeys(("weight", "update", "weight_grad_step"), Phase.OPTIMIZER),
}


@dataclass(frozen=True)
class Line:
    """One comparison: the expected value (of the baseline), the value found, and the limit on their difference.

    Attributes:
        check: code and name, such as ``PD801 underflow-increased``.
        subject: the tensor or figure that was compared, in words.
        excess: found over allowed difference, above 1 if failed; ranks lines. Infinite if a failure has no degree.
        location: the location of the finding, if the line failed.
        numbers: ``(found, expected)`` if they are numbers.
        position: place in the execution order; infinite if unknown.
        allowed: the reason for which a failure is accepted; the line is then information.
    """

    check: str
    subject: str
    expected: str
    found: str
    limit: str
    passed: bool
    severity: Severity
    location: Location | None = None
    numbers: tuple[float | None, float | None] = (None, None)
    excess: float = 0.0
    position: float = math.inf
    allowed: str | None = None

    @property
    def code(self) -> str:
        """Code of the check, such as ``PD801``."""
        return self.check.partition(" ")[0]

    @property
    def module(self) -> str:
        """FQN of the module of the subject; empty for the root and for the whole run."""
        return (self.location.module if self.location is not None else None) or ""

    @property
    def suspect(self) -> str:
        """FQN of the module whose code made the tensor: for an input, the module around the one that received it."""
        made_around = self.location is not None and self.location.kind == "input"
        return self.module.rpartition(".")[0] if made_around else self.module


def reported_lines(lines: Sequence[Line]) -> list[Line]:
    """The failed lines, worst first; if none failed, the one line nearest to its limit."""
    ranked = sorted(lines, key=lambda line: (-line.excess, line.position))
    return [line for line in ranked if not line.passed] or ranked[:1]


#: Checks that locate a fault best, the best first: deviation on the first step, then a changed dtype.
_SHARPEST = ("PD813", "PD808")


def suspects(lines: Sequence[Line]) -> list[str]:
    """FQNs of the modules that failed checks point at, the likeliest first; ``""`` is the root."""
    placed = [line for line in lines if line.location is not None and line.location.module is not None]
    failed = [line for line in placed if not line.passed and line.severity is Severity.ERROR]
    rank = {code: at for at, code in enumerate(_SHARPEST)}
    failed.sort(key=lambda line: (rank.get(line.code, len(rank)), -line.excess, line.position))
    return list(dict.fromkeys(line.suspect for line in failed))


def phase_of(kind: str) -> Phase:
    """The phase of a step in which tensors of this kind are made."""
    return _PHASES.get(kind, Phase.FORWARD)


def location_of(key: Key, step: int | None = None, module_class: str | None = None) -> Location:
    """The location of a tensor, for a finding."""
    return Location(key[0], key[1], module_class or None, key[2], phase_of(key[2]), step=step)


def findings_of(lines: Sequence[Line], repeats: int) -> list[Finding]:
    """One finding per failed check, from lines ranked worst first: on its worst line, the others as evidence.

    ``repeats`` is the number of healthy runs from which the baseline was learned.
    """
    failed = grouped((line.check, line) for line in lines if not line.passed)
    return [_finding(group, repeats) for group in failed.values()]


def _finding(lines: Sequence[Line], repeats: int) -> Finding:
    line = max(lines, key=lambda candidate: candidate.severity.weight)
    code, _, name = line.check.partition(" ")
    more = f" {plural(len(lines) - 1, 'more subject')} above the limit." if len(lines) > 1 else ""
    allowed = f" Allowed: {line.allowed}." if line.allowed is not None else ""
    evidence: dict[str, Any] = {
        "expected": line.numbers[1] if line.numbers[1] is not None else line.expected,
        "found": line.numbers[0] if line.numbers[0] is not None else line.found,
        "limit": line.limit,
        "baseline_runs": repeats,
        "subjects": [{"subject": x.subject, "expected": x.expected, "found": x.found} for x in lines[:_LISTED]],
    }
    if line.allowed is not None:
        evidence["allowed"] = line.allowed
    learned = f"the spread is that of {repeats} baseline runs"
    return Finding(
        code=code,
        name=name,
        severity=line.severity,
        confidence=0.95 if repeats > 1 else 0.8,
        title=f"{name.replace('-', ' ')}: {line.subject}",
        message=f"{line.subject}: expected {line.expected}, found {line.found}, limit {line.limit}.{more}{allowed}",
        location=line.location or Location(),
        evidence={
            **evidence,
            "confidence_reason": learned if repeats > 1 else "one baseline run, no measured run-to-run spread",
        },
    )
