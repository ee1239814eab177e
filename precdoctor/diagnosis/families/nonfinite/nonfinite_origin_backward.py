"""PD102: forward pass and loss were finite, the backward pass made the first NaN or infinity."""

from __future__ import annotations

import math

from precdoctor.diagnosis.advice.larger_loss_scale import loss_scale_of
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, beyond_any_scale, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import there_are
from precdoctor.diagnosis.families.nonfinite.incident import LEAD_TO_NONFINITE, Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_report import check_incidents, confidence_options
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import lower_scale
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, TensorRow, known_format
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
The first non-finite gradient that the backward pass of a step made, while forward pass and loss were finite. The
gradient of a module's output comes from the backward pass of whatever *consumed* that output. The finding therefore
names the consumer: the next module, the functional code between the two, or the loss code. If a gradient is finite
where it was accumulated and non-finite where the optimizer receives it, reduction, unscaling or clipping made it;
of several ranks the one whose own backward pass made it is reported. Steps that a `GradScaler` skipped are not
incidents.
""",
    matters="""
Without a scaler that skips the step, one non-finite gradient element makes weights non-finite at once. Clipping does
not help: the norm is NaN or Inf, and multiplying by it turns the other gradients into 0 or NaN.
""",
    example="""
The derivative of `sqrt` at 0 is infinite, and the forward pass shows nothing:

    distance = ((a - b) ** 2).sum(-1).sqrt()            # gradient NaN where a == b
    distance = ((a - b) ** 2).sum(-1).add(1e-12).sqrt() # finite

Or a constant loss scale: `(loss * 65536).backward()` in FP16, with no check for overflow.
""",
    remedy="""
`loss-scale-overflow`: lower the constant scale to the number in the finding, or let `GradScaler` choose it and skip
overflows. `sqrt-gradient-at-zero`: put a small constant inside the root. If no cause is named, run the step under
`torch.autograd.set_detect_anomaly(True)`: it names the forward line whose backward made the NaN.
""",
    confidence="""
0.9 if the step is fully recorded, 0.05 less if the producer is functional code or the loss code (no hook sees it), 0.5
if the step's tensors are not in the log. For modules left out it is lower, as in PD101. Cause `loss-scale-overflow`
needs FP16, an Inf and a scale above 1; `sqrt-gradient-at-zero` needs exactly as many non-finite gradient elements as
the tensor has zeros.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "PyTorch documentation: torch.autograd.set_detect_anomaly; Automatic Mixed Precision examples",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per incident that begins in the backward pass."""
    return check_incidents(view, RULE, options, _report, (*BACKWARD_KINDS, "weight_grad_step"), "gradient")


def _report(view: RunView, incident: Incident) -> Report:
    origin = incident.origin
    if origin is None:
        message = incident.unrecorded_message(view, "A gradient is non-finite")
        return Report(f"a gradient became non-finite {incident.at_step(view)}", message, _detect_anomaly(incident))
    row = origin.row
    maker = "reduction, unscaling or clipping" if origin.how == "reduction" else origin.maker
    title = f"first non-finite gradient comes from {maker}{incident.cause.in_brackets}"
    message = f"{incident.held_words(view, row)} Forward pass and loss are finite."
    before = incident.path[-2] if len(incident.path) > 1 else None
    message += incident.preceding_words(row, before) if before is not None and not before.bad else ""
    message += incident.cause.sentence + incident.headroom_words + incident.consequence_words
    return Report(title, f"{message} {incident.resume_advice}", _prescribe(view, incident))


def _detect_anomaly(incident: Incident) -> Prescription:
    return Prescription(
        title=f"run step {incident.step} under anomaly detection: it names the line whose backward pass made the value",
        change={"detect_anomaly": True, "from_step": incident.last_finite},
        predicted={"raises_at_step": incident.step},
        snippet=snippets.detect_anomaly(),
    )


def _prescribe(view: RunView, incident: Incident) -> Prescription:
    origin = incident.origin
    assert origin is not None, "the caller has checked it"
    row = origin.row
    fmt = known_format(row.dtype)
    if incident.cause.name == "loss-scale-overflow" and fmt is not None:
        return _lower_scale(view, incident, row, fmt.max)
    if incident.cause.name == "sqrt-gradient-at-zero":
        count = row.non_finite
        return Prescription(
            title=f"add a small constant inside the square root: {there_are(count, 'element')} exactly 0 there",
            change={"eps": {"from": 0.0, "to": 1e-6}, "module": origin.module},
            predicted={"nonfinite_elements": {"from": count, "to": 0}, "largest_derivative": 0.5 / math.sqrt(1e-6)},
            snippet="import torch\n\ny = torch.sqrt(x + 1e-6)  # the derivative at 0 is 500, not infinite\n",
        )
    return _check_gradients(incident) if origin.how == "reduction" else _detect_anomaly(incident)


def _check_gradients(incident: Incident) -> Prescription:
    """Check the gradients between the backward pass, which left them finite, and the optimizer's step."""
    return Prescription(
        title=f"check the gradients of step {incident.step} after the backward pass, after unscaling and after "
        "clipping: one of them made the value, and anomaly detection sees none",
        change={"check_gradients": True, "from_step": incident.last_finite},
        predicted={"raises_at_step": incident.step},
        snippet=(
            "for name, p in model.named_parameters():  # behind each of these lines\n"
            "    if p.grad is not None and not p.grad.isfinite().all():\n"
            "        raise FloatingPointError(name)\n"
        ),
    )


def _lower_scale(view: RunView, incident: Incident, row: TensorRow, largest: float) -> Prescription:
    """Lower the loss scale; ``largest`` is the maximum of the format of ``row``, the gradient."""
    scale = loss_scale_of(view, row)
    headrooms = [s.headroom for s in incident.history if s.headroom is not None and s.step < incident.step]
    # The gradient's headroom on healthy steps shows how far to lower the scale; the overflow alone proves one binade.
    binades = max(1, math.ceil(1.0 - min(headrooms))) if headrooms else 1
    target = 2.0 ** math.floor(math.log2(scale) - binades)
    limit = {"from": largest / scale, "to": largest / target}
    predicted = {"overflow_limit_unscaled": limit, "steps_that_reach_the_weights_with_inf": 0}
    return lower_scale(view, scale, target, predicted)


RULE = Rule(
    code="PD102",
    name="nonfinite-origin-backward",
    severity=Severity.ERROR,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=confidence_options(0.9),
    explains={**when(anywhere, *LEAD_TO_NONFINITE), **when(beyond_any_scale, "PD301")},
    check=check,
)
