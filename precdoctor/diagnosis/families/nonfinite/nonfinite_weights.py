"""PD105: weights or optimizer state that are non-finite although no gradient was."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.op_facts import BadSetting
from precdoctor.diagnosis.claims.finding import Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import there_are
from precdoctor.diagnosis.families.nonfinite.incident import LEAD_TO_NONFINITE, Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_report import check_incidents, confidence_options
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import finite_setting, lower_rate, weights_in_float32
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

#: Binades over which the finite values of uninitialised memory spread; a million normal numbers spread over 22.
_UNINITIALISED_SPREAD = 64

_CHECK_PARAMETERS = """import torch

bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
if bad:  # before the first step: loaded so, or never initialised
    raise ValueError(bad)
"""
_CHECK_CHECKPOINT = """import torch

state = torch.load('checkpoint.pt', weights_only=True)
bad = [n for n, t in state.items() if t.is_floating_point() and not torch.isfinite(t).all()]
if bad:
    raise ValueError(bad)
model.load_state_dict(state)
"""

PAGE = RulePage(
    finds="""
Weights that were finite before an optimizer step and are not after it, although the optimizer received finite
gradients. Optimizer state that became non-finite while the weights stayed finite: an infinite second moment stops a
weight for good, and no loss shows it. Weights that became non-finite between two steps. Weights that were non-finite
from the first recorded step on (loaded, or badly initialised).
""",
    matters="""
Training does not recover from a non-finite weight: every later forward pass is NaN, and skipping steps keeps the
weight as it is. The optimizer itself is at fault here, so a search for an overflow in the model is wasted time.
""",
    example="""
Adam on FP16 weights with the default `eps=1e-8`: FP16 rounds it to 0, the second moment of a small gradient underflows
to 0 as well, and the update is 0/0 or x/0.

    torch.optim.Adam(model.half().parameters(), eps=1e-8)   # eps is 0 in FP16
    torch.optim.Adam(model.float().parameters(), eps=1e-8)  # with autocast for the speed
""",
    remedy="""
Keep weights and optimizer state in FP32 and use autocast for the computation; if that is impossible, choose an `eps`
that the state's format can hold. Count steps in FP32 or in integers: in BF16 `1 - 0.999**1` is 0. If the weights were
non-finite from the start, load an older checkpoint and check it with `torch.isfinite`, or initialise every parameter:
after `to_empty` a parameter holds uninitialised memory unless some `reset_parameters` fills it. If they changed between
steps, check code that writes to parameters (EMA, loading, manual updates).
""",
    confidence="""
0.9 if weight, gradient and update of the step are all recorded; 0.05 less if the change happened between two recorded
steps; 0.5 if the step's tensors are not in the log. Cause `optimizer-division-by-zero` needs an `eps` that
the weight's format rounds to zero; `optimizer-overflow` needs infinities without NaN.
If a learning rate, or another hyper-parameter of the weight's group, is NaN or infinite at that step, the finding names
it with its parameter group; the cause is then `other`.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1 (where eps stands)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1 (FP32 master weights)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per incident that begins in the weights or the optimizer."""
    return check_incidents(view, RULE, options, _report, ("weight", "update"), "weight tensor")


def _report(view: RunView, incident: Incident) -> Report:
    origin = incident.origin
    if origin is None:
        message = incident.unrecorded_message(view, "Weights are non-finite")
        return Report(f"weights became non-finite {incident.at_step(view)}", message, _prescribe(view, incident))
    row = origin.row
    name = row.label if row.kind == "opt_state" else f"`{row.parameter}`"
    cause = incident.cause.in_brackets if incident.how == "optimizer" else ""
    titles = {
        "optimizer": f"the optimizer step made {name} non-finite from finite gradients{cause}",
        "between": f"{name} became non-finite between two optimizer steps",
        "start": f"{name} is non-finite from the first recorded step on",
    }
    message = incident.held_words(view, row)
    if incident.how == "optimizer":
        gradient = next((r for r in incident.path if r.kind == "weight_grad_step"), None)
        if gradient is not None and gradient.amax is not None:
            message += f" The gradient that the optimizer received is finite and reaches {gradient.amax:.4g}."
        message += incident.cause.sentence
    binades = len(row.histogram.counts)
    if incident.how == "start" and binades >= _UNINITIALISED_SPREAD:
        message += (
            f" Its finite values spread over {binades} binades, as uninitialised memory does "
            "(`torch.empty`, or `to_empty` without the module's `reset_parameters`)."
        )
    message += incident.consequence_words
    return Report(titles[incident.how], f"{message} {incident.resume_advice}", _prescribe(view, incident))


def _prescribe(view: RunView, incident: Incident) -> Prescription:
    row = incident.origin.row if incident.origin is not None else None
    facts = view.step_facts(incident.process, incident.step)
    if incident.how == "optimizer" and facts is not None and facts.bad_rates:
        group, rate = facts.bad_rates[0]
        return finite_setting(incident, BadSetting(group, "lr", rate))
    fmt = known_format(row.dtype) if row is not None else None
    if incident.how == "optimizer" and fmt is not None and fmt.mantissa_bits < FP32.mantissa_bits:
        parameters = sum(r.numel for r in incident.path if r.kind == "weight")
        predicted = {"smallest_eps": {"from": fmt.min_subnormal, "to": FP32.min_subnormal}, "weights": parameters}
        reason = f"{fmt.name}'s smallest number is {fmt.min_subnormal:.3g}"
        return weights_in_float32(view, fmt, reason, predicted)
    if incident.how == "optimizer":
        return lower_rate(view, incident)
    count = row.non_finite if row is not None else None
    now = f" ({there_are(count, 'element')} non-finite now)" if count else ""
    what, snippet = "load a finite checkpoint and check it", _CHECK_CHECKPOINT
    if incident.how == "start":
        what, snippet = "initialise every parameter, or load a finite checkpoint", _CHECK_PARAMETERS
    return Prescription(
        title=f"{what}{now}",
        change={"checkpoint_at_or_before": incident.last_finite},
        predicted={"nonfinite_elements": {"from": count, "to": 0}},
        snippet=snippet,
    )


RULE = Rule(
    code="PD105",
    name="nonfinite-weights",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=confidence_options(0.9),
    explains=when(anywhere, *LEAD_TO_NONFINITE),
    check=check,
)
