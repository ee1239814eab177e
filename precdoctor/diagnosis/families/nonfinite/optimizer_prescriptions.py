"""What to do when an optimizer's step made its weights or its state non-finite."""

from __future__ import annotations

from typing import Any

from precdoctor.diagnosis.advice.wide_weights import wide_weights
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.families.nonfinite.culprit import Culprit
from precdoctor.diagnosis.families.nonfinite.culprit_words import bad_of, line_words
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32, Format


def divisor(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """A divisor that is 0: an eps that is 0, or is flushed to it, or none at all."""
    narrow, eps = _narrow(culprit), culprit.op.settings.get("eps")
    if narrow is not None:
        return _in_float32(
            view,
            narrow,
            f"{narrow.name} ends at {narrow.min_subnormal:.3g}",
            {"smallest_eps": {"from": narrow.min_subnormal, "to": FP32.min_subnormal}},
        )
    if eps == 0:
        return Prescription(
            title="give the optimizer an eps above 0 (it is 0)",
            change={"eps": {"from": eps, "to": 1e-8}},
            predicted={"resume_from_step": incident.last_finite},
            snippet="optimizer = type(optimizer)(model.parameters(), eps=1e-8)\n",
        )
    return Prescription(
        title=f"add a small constant to what the optimizer divides by{line_words(culprit)}",
        change={"eps": {"to": 1e-12}},
        predicted={"nonfinite_elements": {"from": bad_of(culprit), "to": 0}, "resume_from_step": incident.last_finite},
        snippet="scale = rho / (norm + 1e-12)  # a gradient of 0 has a norm of 0\n",
    )


def overflow(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """An update, or a sum of them, that left its format's range."""
    narrow = _narrow(culprit)
    if narrow is not None:
        largest = {"largest_finite": {"from": narrow.max, "to": FP32.max}}
        return _in_float32(view, narrow, f"{narrow.name} ends at {narrow.max:g}", largest)
    return Prescription(
        title="lower the learning rate and clip",
        change={"clip_norm": 1.0},
        predicted={"resume_from_step": incident.last_finite},
        snippet=snippets.lower_rate_and_clip(),
    )


def _narrow(culprit: Culprit) -> Format | None:
    """The format of at most five exponent bits (FP16, FP8) that the step computed in, if it did."""
    return next((f for o in culprit.op.operands if (f := known_format(o.dtype)) and f.exponent_bits <= 5), None)


def _in_float32(view: RunView, narrow: Format, reason: str, predicted: dict[str, Any]) -> Prescription:
    return Prescription(
        title=f"keep weights and optimizer state in FP32 ({reason})",
        change={"weight_dtype": {"from": narrow.dtype, "to": FP32.dtype}},
        predicted=predicted,
        snippet=wide_weights(view, (narrow.dtype,)),
    )
