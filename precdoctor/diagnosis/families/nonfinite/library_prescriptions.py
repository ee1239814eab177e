"""The prescription for an op in the code of an installed package, which nobody edits: change its call, or the data."""

from __future__ import annotations

from precdoctor.diagnosis.claims import finding, snippets
from precdoctor.diagnosis.claims.finding import Prescription, Source, at_line
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import NO_TARGET, ZERO_QUOTIENT
from precdoctor.diagnosis.families.nonfinite.incident import Culprit, Incident
from precdoctor.diagnosis.survey.view import RunView

#: The condition that a call's arguments have to meet, by cause.
_CONDITIONS = {
    "division-by-zero": "what {op} divides by must not be 0",
    "optimizer-division-by-zero": "what {op} divides by must not be 0",
    "log-of-nonpositive": "the operand of {op} must be above 0",
    "sqrt-of-negative": "the operand of {op} must not be negative",
    "exp-overflow": "the operand of {op} must be smaller",
    "domain-error": "the operand of {op} must lie where {op} is defined",
    "softmax-fully-masked": "no row may be masked throughout",
    "sqrt-gradient-at-zero": "the operand of {op} must not be 0, where its derivative is infinite",
    "norm-gradient-at-zero": "the operand of {op} must not be 0, where it has no derivative",
    "domain-edge-gradient": "the operand of {op} must not lie where its derivative is infinite",
}


def user_line(view: RunView, incident: Incident, culprit: Culprit) -> Source | None:
    """The last line of the user's code on the way to the op; None if the log has none."""
    replay = culprit.replay
    if culprit.op.caller is None and replay.called_by_library:  # the user may have called backward()
        return view.detection(incident.process, incident.step)
    return culprit.op.caller or replay.call


def library_words(view: RunView, incident: Incident, culprit: Culprit) -> str:
    """A sentence if the op's line is in a library, with the last line of the user's code; else empty."""
    if not culprit.op.in_library or culprit.source is None:
        return ""
    return finding.library_words(culprit.source, user_line(view, incident, culprit))


def change_the_call(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Change the arguments of the user's call, or the data, because the op's line is in a library."""
    line, made = user_line(view, incident, culprit), culprit.forward_op or culprit.op
    change = {"call": None if line is None else f"{line.file}:{line.line}", "module": culprit.module}
    if any(words in culprit.cause.why for words in (ZERO_QUOTIENT, NO_TARGET)):
        return Prescription(
            title="leave out batches in which nothing is counted: labels that are all ignored, a mask without a 1"
            + (f" (called{at_line(line)})" if line is not None else ""),
            change={**change, "filter": "counted"},
            predicted=culprit.predicted_effect,
            snippet=(
                "# where batches are made; -100 is the label that torch and transformers ignore\n"
                "if not (labels != -100).any():\n"
                "    raise ValueError('no label of this batch counts: its loss is 0 / 0')\n"
            ),
        )
    wanted = _CONDITIONS.get(culprit.cause.name or "", "they must be such that {op} stays finite").format(op=made.short)
    return Prescription(
        title=f"change the arguments of the call{at_line(line)} or the data, not the library: {wanted}",
        change=change,
        predicted=culprit.predicted_effect,
        snippet=snippets.halt_on_nonfinite(culprit.module or ""),
    )
