"""What prescriptions ask of a culprit: operands, counts, its line; and the prescription where there is no remedy."""

from __future__ import annotations

from collections.abc import Callable

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Phase, Prescription
from precdoctor.diagnosis.families.nonfinite.culprit import Culprit
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.survey.bad_data import BadTensor, as_read, chosen, field_words
from precdoctor.diagnosis.survey.op_facts import Op, Operand
from precdoctor.diagnosis.survey.view import RunView

Maker = Callable[[RunView, Incident, Culprit], Prescription]


def operand_of(culprit: Culprit, at: int = 0) -> Operand | None:
    """One operand of the op by its position; null when the log has no such."""
    operands = culprit.op.operands
    return operands[at] if -len(operands) <= at < len(operands) else None


def bad_of(culprit: Culprit) -> int:
    """Non-finite elements that it made."""
    return sum(r.bad for r in culprit.op.results)


def held_by(culprit: Culprit) -> Operand | None:
    """The tensor from before the step that the op read, as it was then; null where the log lacks it."""
    external, op = culprit.blamed.external, culprit.op
    if external is None:
        return None
    given = next((o for o in culprit.examined.batch if o.argument == external[1]), None)
    read = next((o for o, maker in zip(op.operands, op.makers, strict=False) if maker == external), None)
    return given if given is not None and external[1] else read


def data_of(culprit: Culprit) -> BadTensor | None:
    """The tensor of the data that holds what the op read; null when that is no data, or was finite as delivered."""
    external, held, examined = culprit.blamed.external, held_by(culprit), culprit.examined
    if external is None or culprit.phase is not Phase.DATA:
        return None
    if held is None or not held.bad:
        return examined.bad_data[0] if len(examined.bad_data) == 1 else None
    name = "the target" if culprit.blamed.of_target else field_words(external[1], "argument")
    read = as_read(name, held)
    delivered = chosen(examined.bad_data, read)
    return delivered or (None if external[0] == "batch" and examined.data_is_finite else read)


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
