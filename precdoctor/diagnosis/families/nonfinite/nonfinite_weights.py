"""PD105: weights that are non-finite although no gradient was."""

from __future__ import annotations

from precdoctor.diagnosis.advice.wide_weights import wide_weights
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.claims.words import there_are
from precdoctor.diagnosis.families.nonfinite.incident_report import (
    check_incidents,
    confidence_options,
    consequences,
    looked_at,
    resume_advice,
    unrecorded_message,
    where_words,
)
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import finite_setting
from precdoctor.diagnosis.survey.op_facts import BadSetting
from precdoctor.diagnosis.survey.rows import TensorRow, known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

#: From the smallest to the largest magnitude of a weight that holds whatever memory held. Of a million normally
#: distributed numbers the smallest is 22 binades below the largest.
_BINADES_OF_NO_INITIALISER = 64

PAGE = RulePage(
    finds="""
Weights that were finite before an optimizer step and are not after it, although the gradients the optimizer received
were finite; optimizer state that became non-finite while the weights stayed finite (an infinite second moment stops a
weight for good, and no loss shows it); weights that changed to a non-finite value between two steps; and weights that
were non-finite from the first recorded step on (loaded, or badly initialised).
""",
    matters="""
Nothing recovers from a non-finite weight: every later forward pass is NaN, and skipping steps keeps the bad weight.
The optimizer itself is at fault here, so looking for an overflow in the model is wasted time.
""",
    example="""
Adam on FP16 weights with the default `eps=1e-8`: FP16 rounds it to 0, the second moment of a small gradient underflows
to 0 as well, and the update is 0/0 or x/0.

    torch.optim.Adam(model.half().parameters(), eps=1e-8)   # eps is 0 in FP16
    torch.optim.Adam(model.float().parameters(), eps=1e-8)  # with autocast for the speed
""",
    remedy="""
Keep weights and optimizer state in FP32 and use autocast for the computation; if that is impossible, choose an `eps`
the state's format can hold. If the weights were bad from the start, load an older checkpoint and check it with
`torch.isfinite`, or initialise what never was: after `to_empty` a parameter holds whatever the memory held, unless some
`reset_parameters` fills it. If they changed between steps, look at code that writes to parameters (EMA, loading, manual
updates).
""",
    confidence="""
0.9 when weight, gradient and update of the step are all recorded; 0.05 less when the change happened between two
recorded steps; 0.5 when the step's tensors are not in the log. Cause `optimizer-division-by-zero` needs an `eps` that
the weight's format rounds to zero; `optimizer-overflow` needs infinities without NaN.
A learning rate, or another hyper-parameter of the weight's group, that is NaN or infinite at that step is named with
its parameter group; its cause is `other`.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1 (where eps stands)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1 (FP32 master weights)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """Findings for every incident that begins in the weights."""
    seen = looked_at(view, ("weight", "update"), "weight tensor")
    return check_incidents(view, RULE, options, _tell, seen)


def _tell(view: RunView, incident: Incident) -> tuple[str, str, Prescription]:
    origin = incident.origin
    if origin is None:
        title = f"weights became non-finite {where_words(view, incident)}"
        return title, unrecorded_message(view, incident, "Weights are non-finite"), _prescribe(view, incident)
    row = origin.row
    where = where_words(view, incident)
    state = row.kind == "opt_state"
    name = row.label if state else f"`{'.'.join(p for p in (row.module, row.name) if p)}`"
    cause = incident.cause.in_brackets if incident.how == "optimizer" else ""
    titles = {
        "optimizer": f"the optimizer step made {name} non-finite from finite gradients{cause}",
        "between": f"{name} became non-finite between two optimizer steps",
        "start": f"{name} is non-finite from the first recorded step on",
    }
    message = f"{where.capitalize()}, {row.label} ({row.dtype}) holds {row.count_words()}; limit 0."
    if incident.how == "optimizer":
        given = next((r for r in incident.path if r.kind == "weight_grad_step"), None)
        if given is not None and given.amax is not None:
            message += f" The gradient the optimizer was given is finite and reaches {given.amax:.4g}."
        message += incident.cause.sentence
    if incident.how == "start" and _looks_uninitialised(row):
        message += (
            f" Its finite values spread over {len(row.histogram.counts)} binades, as uninitialised memory does "
            "(`torch.empty`, or `to_empty` where a module's `reset_parameters` is not called)."
        )
    effects = consequences(incident)
    if effects:
        message += f" In the same step also non-finite: {', '.join(effects)}."
    return titles[incident.how], f"{message} {resume_advice(incident)}", _prescribe(view, incident)


def _looks_uninitialised(row: TensorRow) -> bool:
    return len(row.histogram.counts) >= _BINADES_OF_NO_INITIALISER


def _prescribe(view: RunView, incident: Incident) -> Prescription:
    row = incident.origin.row if incident.origin is not None else None
    facts = view.step_facts(incident.process, incident.step)
    if incident.how == "optimizer" and facts is not None and facts.bad_rates:
        group, rate = facts.bad_rates[0]
        return finite_setting(incident, BadSetting(group, "lr", rate))
    fmt = known_format(row.dtype) if row is not None else None
    if incident.how == "optimizer" and fmt is not None and fmt.mantissa_bits < FP32.mantissa_bits:
        parameters = sum(r.numel for r in incident.path if r.kind == "weight")
        return Prescription(
            title=f"keep weights and optimizer state in FP32 ({fmt.name}'s smallest number is {fmt.min_subnormal:.3g})",
            change={"weight_dtype": {"from": fmt.dtype, "to": FP32.dtype}},
            predicted={"smallest_eps": {"from": fmt.min_subnormal, "to": FP32.min_subnormal}, "weights": parameters},
            snippet=wide_weights(view, (fmt.dtype,)),
        )
    if incident.how == "optimizer":
        lr = facts.lr if facts is not None and facts.lr else None
        return Prescription(
            title=f"lower the learning rate{f' from {lr:.3g} to {lr / 10:.3g}' if lr else ''} and clip the gradient",
            change={"lr": {"from": lr, "to": lr / 10 if lr else None}},
            predicted={"update_binades": -3.3},
            snippet=snippets.lower_rate_and_clip(),
        )
    count = row.nan + row.inf if row is not None else None
    now = f" ({there_are(count, 'element')} non-finite now)" if count else ""
    if incident.how == "start":
        return Prescription(
            title=f"initialise every parameter, or load a finite checkpoint{now}",
            change={"checkpoint_at_or_before": None},
            predicted={"nonfinite_elements": {"from": count, "to": 0}},
            snippet=(
                "import torch\n\n"
                "bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]\n"
                "if bad:  # before the first step: loaded so, or never initialised\n    raise ValueError(bad)\n"
            ),
        )
    return Prescription(
        title=f"load a finite checkpoint and check it{now}",
        change={"checkpoint_at_or_before": incident.last_finite},
        predicted={"nonfinite_elements": {"from": count, "to": 0}},
        snippet=(
            "import torch\n\n"
            "state = torch.load('checkpoint.pt', weights_only=True)\n"
            "bad = [n for n, t in state.items() if t.is_floating_point() and not torch.isfinite(t).all()]\n"
            "if bad:\n    raise ValueError(bad)\n"
            "model.load_state_dict(state)\n"
        ),
    )


RULE = Rule(
    code="PD105",
    name="nonfinite-weights",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=confidence_options(0.9),
    kinds=("weight", "weight_grad_step", "update"),
    columns=("nan", "pos_inf", "neg_inf", "amax"),
    check=check,
)
