"""PD103: every tensor of the forward pass was finite, the loss was not."""

from __future__ import annotations

from typing import Any

from precdoctor.diagnosis.advice.narrow_formats import computes_narrow, widened
from precdoctor.diagnosis.claims.finding import Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, makes_it_fall, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.families.nonfinite.domain_prescriptions import clamp_log
from precdoctor.diagnosis.families.nonfinite.incident import LEAD_TO_NONFINITE, Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_report import check_incidents, confidence_options
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
A step on which every output of the model is finite and the loss is not: functional loss code, a loss module such as
`CrossEntropyLoss`, or code between the model and that module. The rule also reports a non-finite loss on a step that
was not recorded with full statistics; the finding then says that the origin is unknown.
""",
    matters="""
The loss code runs outside every module hook and is often written by hand. It is the usual place of `log(0)`, of `exp`
of a raw logit, and of a mean over no elements.
""",
    example="""
    loss = -(target * probabilities.log()).sum()          # log(0) when a probability underflows
    loss = F.cross_entropy(logits, target)                # log-softmax, stable

A mean over an empty selection is 0/0: `loss[mask].mean()` with an all-false mask, or `CrossEntropyLoss` when every
target is `ignore_index`.
""",
    remedy="""
Prefer the fused forms (`cross_entropy`, `binary_cross_entropy_with_logits`, `log_softmax`, `logsumexp`), compute the
loss of a narrow model in FP32, clamp the operand of `log`, and guard means against empty selections. A target of
`kl_div` that holds logarithms needs `log_target=True`. Resume from a checkpoint at or before the step that the finding
names.
""",
    confidence="""
0.95 if the step is fully recorded: the last module output is finite and the loss is not. 0.5 if the step's tensors are
not in the log: the loss is certainly non-finite, but its origin is unknown. For modules left out it is lower, as in
PD101. A cause needs its trace in the numbers: exact zeros among probabilities for `log-of-nonpositive`, values above
`ln(max)` of the loss dtype for `exp-overflow`.
""",
    references=(
        "PyTorch documentation: torch.nn.functional.cross_entropy, binary_cross_entropy_with_logits",
        "Blanchard, Higham, Higham, Accurately computing the log-sum-exp and softmax functions, IMA JNA 2021",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per incident that begins in the loss."""
    return check_incidents(view, RULE, options, _report, ("loss",), "loss")


def _report(view: RunView, incident: Incident) -> Report:
    origin = incident.origin
    if origin is None:
        message = incident.unrecorded_message(view, "The loss is non-finite")
        return Report(f"the loss became non-finite {incident.at_step(view)}", message, _guard(view, incident))
    row = origin.row
    maker = "the loss code" if origin.how == "loss" else origin.maker
    title = f"the loss became non-finite in {maker}{incident.cause.in_brackets}, the model's outputs are finite"
    message = incident.held_words(view, row) + incident.preceding_words(row, incident.preceding)
    message += incident.cause.sentence
    return Report(title, f"{message} {incident.resume_advice}", _prescribe(view, incident))


def _prescribe(view: RunView, incident: Incident) -> Prescription:
    after = incident.preceding
    if incident.cause.name == "log-of-nonpositive" and after is not None:
        return clamp_log(after.dtype, after.zero)
    if incident.cause.name == "exp-overflow" and after is not None:
        return Prescription(
            title=f"use logsumexp / log_softmax: exp of {after.amax:.4g} overflows",
            change={"loss": "log_softmax"},
            predicted={"largest_exponent": {"from": after.amax, "to": 0.0}},
            snippet="import torch.nn.functional as F\n\n"
            f"loss = F.cross_entropy({widened('logits', after.dtype)}, target)\n",
        )
    return _guard(view, incident)


def _guard(view: RunView, incident: Incident) -> Prescription:
    """Stop on a non-finite loss; if the run computes in a narrow format, also compute the loss in FP32."""
    after = incident.preceding
    reach = f" (logits reach {after.amax:.4g})" if after is not None and after.amax is not None else ""
    title = f"stop at step {incident.step} on a non-finite loss and inspect what the loss code reads"
    change: dict[str, Any] = {"check": "isfinite", "step": incident.step}
    loss = "loss = loss_fn(output, target)\n"
    if computes_narrow(view):
        title = f"compute the loss in FP32 and stop at step {incident.step} on a non-finite value"
        change = {"loss_dtype": "float32"}
        loss = f"with torch.autocast({view.device!r}, enabled=False):\n    loss = loss_fn(output.float(), target)\n"
    stop = "if not torch.isfinite(loss):\n    raise FloatingPointError('loss is not finite')\n"
    return Prescription(
        title=f"{title}{reach}",
        change=change,
        predicted={"stops_at_step": incident.step, "resume_from_step": incident.last_finite},
        snippet=f"import torch\n\n{loss}{stop}",
    )


RULE = Rule(
    code="PD103",
    name="nonfinite-loss",
    severity=Severity.ERROR,
    triage=Triage.LOSS,
    page=PAGE,
    options=confidence_options(0.95),
    explains={**when(makes_it_fall, "PD301"), **when(anywhere, *LEAD_TO_NONFINITE)},
    check=check,
)
