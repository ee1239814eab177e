"""The form of a rule: a code, a name, a page, options, the data it needs, and one pure function.

One rule is one file in a folder of ``diagnosis/families/``, ending in a module-level ``RULE``. The page has fixed
headings because ``explain``, the documentation and machine-readable reports all render the same text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import Relation

if TYPE_CHECKING:
    from precdoctor.diagnosis.survey.view import RunView

#: Option values by name, defaults filled in.
Options = Mapping[str, float]
#: Source of a default that has no other.
EMPIRICAL = "Chosen empirically; no published source."


class Triage(enum.IntEnum):
    """The order in which causes are ruled out; an earlier fault explains a later one, never the reverse."""

    DATA = 0
    LEARNING_RATE = 1
    LOSS_SCALE = 2
    FORWARD = 3
    LOSS = 4
    BACKWARD = 5
    OPTIMIZER = 6


@dataclass(frozen=True)
class RuleOption:
    """A threshold of a rule, which a user can change; checks contain no bare numbers."""

    name: str
    default: float
    unit: str
    #: Meaning of the option, one sentence.
    doc: str
    #: Source of the default.
    source: str = EMPIRICAL
    minimum: float = 0.0
    maximum: float = float("inf")


def fraction(name: str, default: float, doc: str, source: str = EMPIRICAL, minimum: float = 0.0) -> RuleOption:
    """Return an option that is a fraction, at most 1."""
    return RuleOption(name, default, "fraction", doc, source, minimum, maximum=1.0)


@dataclass(frozen=True)
class RulePage:
    """The sections of a rule's page: Markdown without headings."""

    finds: str
    matters: str
    example: str
    remedy: str
    #: How the confidence of a finding is computed.
    confidence: str
    references: tuple[str, ...]


#: Fewest steps for a trustworthy "No findings": rules that follow a run over its steps (growth, explosions, dead
#: layers, updates) need 6 to 8.
ENOUGH_STEPS = 8


@dataclass(frozen=True)
class Checked:
    """The outcome of a check. Without findings the engine makes it passed, indeterminate or not-applicable."""

    findings: Sequence[Finding]
    #: What was checked or found, for a reader: "412 gradients on 50 steps, none flushed above 4 %".
    reason: str
    #: Set if a check without findings has not passed.
    status: Status | None = None
    #: Whether the rule raised an exception, which has been logged.
    defect: bool = False

    @classmethod
    def not_applicable(cls, reason: str) -> Checked:
        """Return the outcome of a rule that has nothing to check in this run."""
        return cls((), reason, Status.NOT_APPLICABLE)

    @classmethod
    def indeterminate(cls, reason: str) -> Checked:
        """Return the outcome of a rule whose data are missing."""
        return cls((), reason, Status.INDETERMINATE)


@dataclass(frozen=True)
class Rule:
    """One rule. ``check`` is pure: the same view and options give the same result."""

    code: str
    name: str
    severity: Severity
    triage: Triage
    page: RulePage
    options: tuple[RuleOption, ...]
    check: Callable[[RunView, Options], Checked]
    #: Whether the rule needs sampled steps; without any it is indeterminate.
    sampled_steps: bool = True
    #: Whether to check the newer half of a run by itself if the whole run shows nothing: the measure is a median or a
    #: sum over the steps, which hides what began late.
    newer_half: bool = False
    #: Whether a fresh model may leave such a state by itself: in runs of fewer than ENOUGH_STEPS, findings are notes.
    settles: bool = False
    #: Codes whose findings this rule's findings may explain, and the relation that has to hold; see :mod:`.relations`.
    explains: Mapping[str, Relation] = field(default_factory=dict)

    def finding(
        self,
        *,
        title: str,
        message: str,
        confidence: float,
        location: Location,
        severity: Severity | None = None,
        cause: str | None = None,
        evidence: Mapping[str, Any] | None = None,
        prescription: Prescription | None = None,
        prescriptions: Sequence[Prescription] = (),
    ) -> Finding:
        """Return a finding with this rule's code and name.

        Args:
            confidence: probability that the claim is right, in [0, 1].
            severity: by default the rule's own.
            evidence: measured values and limits; see :class:`.finding.Finding`.
            prescription: the only prescription; several are passed as ``prescriptions``.
        """
        return Finding(
            code=self.code,
            name=self.name,
            severity=self.severity if severity is None else severity,
            confidence=confidence,
            title=title,
            message=message,
            location=location,
            cause=cause,
            evidence={} if evidence is None else evidence,
            prescriptions=prescriptions if prescription is None else (prescription,),
        )

    @property
    def severity_words(self) -> str:
        """``warning``, and when its findings are notes instead."""
        briefly = f" (a note in runs of fewer than {ENOUGH_STEPS} steps)" if self.settles else ""
        return f"{self.severity.value}{briefly}"

    def markdown(self) -> str:
        """Return the rule's whole page."""
        rows = [f"| `{o.name}` | {o.default:g} | {o.unit} | {o.doc} {o.source} |" for o in self.options]
        table = ["| option | default | unit | meaning and source |", "|---|---|---|---|", *rows]
        parts = [
            f"# {self.name} ({self.code})",
            f"Severity: {self.severity_words}. Triage: {self.triage.name.lower().replace('_', ' ')}.",
            f"## What it finds\n\n{self.page.finds.strip()}",
            f"## Why it matters\n\n{self.page.matters.strip()}",
            "## Example\n\n" + self.page.example.strip("\n"),
            f"## What to do\n\n{self.page.remedy.strip()}",
            "## Options\n\n" + ("\n".join(table) if rows else "None."),
            f"## Confidence\n\n{self.page.confidence.strip()}",
            "## References\n\n" + "\n".join(f"- {r}" for r in self.page.references),
        ]
        return "\n\n".join(parts) + "\n"
