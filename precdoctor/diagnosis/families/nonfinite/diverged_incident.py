"""Reports an incident that ended a divergence: the root first, one change that mends it, the op as the place."""

from __future__ import annotations

from typing import Any

from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.divergence.learning_rates import JUMP
from precdoctor.diagnosis.divergence.onset import EXPLODED, REPLACED, Divergence
from precdoctor.diagnosis.divergence.report import chain_words, root_cure, root_evidence, root_words
from precdoctor.diagnosis.families.nonfinite.incident_report import Told, resume_advice
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.survey.view import RunView

#: Causes of non-finite values that huge operands have. What is undefined of small ones is the op's own fault.
OF_MAGNITUDE = frozenset(
    (
        *(None, "other", "matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow"),
        *("exp-overflow", "optimizer-overflow", "inf-minus-inf"),
    )
)


def tell_root(view: RunView, incident: Incident, divergence: Divergence) -> tuple[Told, dict[str, Any]]:
    """Title, message and prescription that lead with the root, and what they add to the evidence."""
    ended = _ended(incident)
    limits = f"{REPLACED:g} for update / weight, {EXPLODED:g} times for a norm, {JUMP:g} times for a rate"
    message = (
        f"{chain_words(divergence, incident.step, ended)} The limits are {limits}.{incident.cause.sentence} A wider "
        f"format or a clamp at that place would only hide it. {resume_advice(incident)}"
    )
    words = f"{root_words(view, divergence)}; at step {incident.step} {ended}"
    return (words, message, root_cure(view, divergence)), root_evidence(divergence)


def _ended(incident: Incident) -> str:
    """``exp in `blocks.0.attn` overflows``: where and how the divergence showed."""
    op = incident.culprit.op if incident.culprit is not None else None
    if op is not None and op.phase == "optimizer":
        return f"the optimizer step leaves `{'.'.join(filter(None, (op.module, op.parameter)))}` non-finite"
    if op is not None and incident.culprit is not None:
        module = incident.culprit.module if incident.culprit.examined.root else None
        where = (
            "the loss code" if not incident.culprit.examined.root else f"`{module or incident.culprit.examined.root}`"
        )
        return f"{op.short} in {where} becomes non-finite"
    if incident.origin is not None:
        return f"{incident.origin.row.label} becomes non-finite"
    return "the loss is non-finite" if incident.phase is Phase.LOSS else "values become non-finite"
