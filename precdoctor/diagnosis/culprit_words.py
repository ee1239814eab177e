"""What prescriptions ask of a culprit: operands, counts, its line; and the prescription where there is no remedy."""

from __future__ import annotations

from collections.abc import Callable

from precdoctor.diagnosis import snippets
from precdoctor.diagnosis.examination import Culprit
from precdoctor.diagnosis.examined import Op, Operand
from precdoctor.diagnosis.finding import Prescription
from precdoctor.diagnosis.incident import Incident
from precdoctor.diagnosis.view import RunView

Maker = Callable[[RunView, Incident, Culprit], Prescription]


def operand_of(culprit: Culprit, at: int = 0) -> Operand | None:
    """One operand of the op by its position; null when the log has no such."""
    operands = culprit.op.operands
    return operands[at] if -len(operands) <= at < len(operands) else None


def bad_of(culprit: Culprit) -> int:
    """Non-finite elements that it made."""
    return sum(r.bad for r in culprit.op.results)


def line_words(culprit: Culprit) -> str:
    """`` at train.py:12``."""
    return f" at {culprit.source.file}:{culprit.source.line}" if culprit.source is not None else ""


def forward_of(culprit: Culprit) -> Op | None:
    """The forward op whose derivative the op computes; null when it computes none, or the log lacks that."""
    return culprit.examined.ops.get(culprit.op.forward) if culprit.op.forward is not None else None


def look(_view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Stop at the module on the first bad value; at the line, where that is in no module."""
    inside = culprit.module or culprit.examined.root
    if not inside and culprit.source is not None:
        return Prescription(
            title=f"stop{line_words(culprit)} on the first bad value and look at what goes in",
            change={"line": f"{culprit.source.file}:{culprit.source.line}"},
            predicted={"stops_at_step": incident.step, "nonfinite_elements": bad_of(culprit)},
            snippet=snippets.stop_behind_line(),
        )
    return Prescription(
        title=f"stop at {f'`{inside}`' if inside else 'the model'} on the first bad value and look at what goes in",
        change={"module": culprit.module, "hook": "forward"},
        predicted={"stops_at_step": incident.step, "nonfinite_elements": bad_of(culprit)},
        snippet=snippets.halt_on_nonfinite(culprit.module or ""),
    )
