"""The prescriptions of a diagnosis for a prescription file: changes, computed effects and cost, for a review."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from precdoctor.diagnosis.analyses.parameters import HALF, recorded_parameters, states_per_parameter
from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, Prescription
from precdoctor.diagnosis.prescriptions.candidates import Candidate, candidates
from precdoctor.diagnosis.prescriptions.effects import Effect, effects
from precdoctor.diagnosis.prescriptions.frameworks import edits
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.runlog.atomic import jsonable
from precdoctor.runlog.changes import Change

_NO_NUMBER = "its effect cannot be computed from this log"
_ALTERNATIVE = "it is an alternative to one above; to try it, set apply = true here and false there"


@dataclass(frozen=True)
class Prescribed:
    """One prescription as a file holds it.

    Attributes:
        code, finding, confidence: code, title and confidence of its finding.
        title: what to do.
        apply: whether ``record --apply`` makes the changes; a reviewer may change it.
        why_not: why ``apply`` is False; else empty.
        changes: the changes to make together; empty if the script must be edited.
        memory_bytes: additional memory per process; None without changes.
        evidence: the numbers of the finding's evidence.
        rule_predicts: the numbers of the rule's own prediction, if no effect could be computed.
        snippets: the edit of the script that makes the change permanent, by framework.
    """

    code: str
    finding: str
    confidence: float
    title: str
    apply: bool
    why_not: str = ""
    changes: tuple[Change, ...] = ()
    effects: tuple[Effect, ...] = ()
    memory_bytes: int | None = None
    evidence: Mapping[str, Any] | None = None
    rule_predicts: Mapping[str, Any] | None = None
    snippets: Mapping[str, str] = field(default_factory=dict)


def prescribe(view: RunView, diagnosis: Diagnosis) -> list[Prescribed]:
    """Return all prescriptions, those of the most important finding first; each set of changes once.

    At most one prescription per finding, and one per setting, has ``apply``.
    """
    found: list[Prescribed] = []
    for finding in diagnosis.findings:
        new: list[Prescribed] = []
        for rule in finding.prescriptions:
            for candidate in candidates(view, finding, rule):
                one = _prescription_of(view, finding, rule, candidate)
                if not one.changes or all(one.changes != other.changes for other in (*found, *new)):
                    new.append(one)
        claimed = {_target(c) for other in found if other.apply for c in other.changes}
        for one in new:
            if one.apply and claimed & {_target(c) for c in one.changes}:
                found.append(replace(one, apply=False, why_not="another prescription above sets the same"))
            elif one.apply and any(other.apply and other.finding == one.finding for other in found):
                found.append(replace(one, apply=False, why_not=_ALTERNATIVE))
            else:
                found.append(one)
    return found


def _target(change: Change) -> tuple[str, str, str]:
    return (change.setting, change.root, change.module)


def _prescription_of(view: RunView, finding: Finding, rule: Prescription, candidate: Candidate) -> Prescribed:
    """Return the prescription of one candidate; ``apply`` is set if at least one effect can be computed."""
    known_effects = effects(view, finding, rule, candidate.changes) if candidate.changes else []
    usable = bool(known_effects)
    alternative = candidate.title != rule.title  # neither snippet nor prediction of the rule are about it
    return Prescribed(
        code=finding.code,
        finding=finding.title,
        confidence=finding.confidence,
        title=candidate.title,
        apply=usable,
        why_not="" if usable else candidate.why_not or _NO_NUMBER,
        changes=candidate.changes,
        effects=tuple(known_effects),
        memory_bytes=sum(_memory_of(view, c) for c in candidate.changes) if candidate.changes else None,
        evidence={k: v for k, v in jsonable(finding.evidence).items() if _is_number(v)},
        rule_predicts=None if alternative or usable else _numbers(rule.predicted),
        snippets=edits(candidate.changes, view.device) or ({} if alternative else {"torch": rule.snippet}),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the numbers of a nested mapping under dotted names."""
    out: dict[str, Any] = {}
    for key, value in jsonable(values).items():
        if isinstance(value, Mapping):
            out |= _numbers(value, f"{prefix}{key}.")
        elif _is_number(value):
            out[f"{prefix}{key}"] = value
    return out


def _memory_of(view: RunView, change: Change) -> int:
    """Estimate the additional bytes of a change per process: wider activations, weights and optimizer states."""
    if change.setting == "optimizer.master_weights":
        elements = sum(n for _, n, dtype in _weights(view) if dtype in HALF)
        return elements * (4 + 2 * states_per_parameter(view))  # the master, and optimizer states that become FP32
    if change.setting != "module.dtype" or change.to != "float32":
        return 0
    below = [n for module, n, dtype in _weights(view) if dtype in HALF and _within(module, change)]
    rows = view.rows(view.processes[0], view.sampled_steps[0]) if view.sampled_steps else ()
    outputs = [r.numel for r in rows if r.kind == "output" and r.dtype in HALF and _within(r.module, change)]
    return 2 * (sum(outputs) + sum(below))


def _within(module: str, change: Change) -> bool:
    return not change.module or module == change.module or module.startswith(f"{change.module}.")


def _weights(view: RunView) -> Sequence[tuple[str, int, str]]:
    """Return module, number of elements and dtype of each weight of the first process with facts."""
    process = next((p for p in view.processes if view.facts(p)), None)
    known = recorded_parameters(view, process) if process is not None else ()
    return [(place[1], math.prod(map(int, p.get("shape") or ())), text(p.get("dtype"))) for place, p in known]
