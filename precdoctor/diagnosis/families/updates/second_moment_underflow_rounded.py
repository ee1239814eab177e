"""PD506, rounded state: the second of Adam's moments is zero where the first is not, because state was rounded.

Both moments are averages over the same gradients, so that the second one bounds the first. State that goes through a
narrower format between steps (a checkpoint saved in FP16) keeps the first moment, of the gradient's size, and loses the
second, of its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.optimizer_states import MOMENT_COLUMNS, Held, adds_eps_to_root, held_in, label
from precdoctor.diagnosis.survey.parameters import ADAM, parameter_groups
from precdoctor.diagnosis.survey.rows import Parameter, number, parameter_of, text
from precdoctor.diagnosis.survey.view import Process, RunView, process_step

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_At = tuple[Parameter, Process, int]


@dataclass(frozen=True)
class Orphaned:
    """First moments whose second is exactly zero, after a step.

    Attributes:
        elements: least number with a first moment above eps and a second moment of zero.
        share: the same over the parameter's elements.
    """

    owner: Parameter
    process: Process
    step: int
    module_class: str
    elements: float
    share: float


@dataclass(frozen=True)
class Leap:
    """The longest step of a parameter, in learning rates: ``|dw| / lr``."""

    owner: Parameter
    process: Process
    step: int
    module_class: str
    rates: float


def adam_bound(beta1: float, beta2: float) -> float | None:
    """Length of Adam's longest possible step in learning rates, whatever its gradients; None if there is no bound.

    By Cauchy and Schwarz ``m^2 <= v * sum over k of (1 - beta1)^2 beta1^2k / ((1 - beta2) beta2^k)``, a geometric
    series. Bias correction shortens it with the usual settings. For 0.9 and 0.999 it is 7.27; Kingma and Ba
    (arXiv:1412.6980, section 2.1) give 3.16 for a single gradient.
    """
    if not 0.0 <= beta1 < 1.0 or not beta1**2 < beta2 < 1.0:
        return None
    return max(1.0, (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1**2 / beta2)))


def orphaned(view: RunView, eps: float, share: float, least: float) -> Mapping[Parameter, Orphaned]:
    """FP32 moments of which ``share``, and ``least`` elements, are orphaned: the first such step of each parameter."""
    if not adds_eps_to_root(view):
        return {}
    fp32 = ("dtype", "==", "float32")
    second: dict[_At, Held] = {}
    for r in view.scan_records(MOMENT_COLUMNS, ("opt_state",), where=(fp32, ("zero", ">", 0))):
        name, _, key = str(r["name"]).rpartition(".")
        if key == _SECOND:
            second[_at(r, name)] = held_in(r)
    found: dict[Parameter, Orphaned] = {}
    steps = sorted({step for *_, step in second})
    for r in view.scan_records(MOMENT_COLUMNS, ("opt_state",), steps=steps, where=(fp32,)) if steps else ():
        name, _, key = str(r["name"]).rpartition(".")
        at = _at(r, name)
        if key != _FIRST or at not in second or (at[0] in found and found[at[0]].step <= at[2]):
            continue
        v = second[at]
        lost = held_in(r).certainly_above(eps) - (v.numel - v.zero)
        if int(r["numel"]) == v.numel and lost >= max(least, share * v.numel):
            found[at[0]] = Orphaned(*at, v.module_class, lost, lost / v.numel)
    return found


def leaps(view: RunView, times: float) -> Mapping[Parameter, Leap]:
    """Steps of FP32 weights ``times`` longer than Adam can make them: the longest of each weight."""
    bound = _bound(view)
    if bound is None:
        return {}
    decay = max(number(g.get("weight_decay")) or 0.0 for g in parameter_groups(view))
    rates: dict[tuple[Process, int], float] = {}
    for process, steps in view.timeline.items():
        for s in steps:
            if s.lr and not s.skipped:
                rates[process, s.step] = max(s.lr, rates.get((process, s.step), 0.0))
    columns = ("root", "module", "module_class", "kind", "name", "dtype", "amax")
    sizes: dict[_At, float] = {}
    found: dict[Parameter, Leap] = {}
    for kind in ("weight", "update"):
        for r in view.scan_records(columns, (kind,)):
            at, amax = _at(r, str(r["name"])), number(r["amax"])
            if amax is None or str(r["dtype"]) != "float32":
                continue
            if kind == "weight":
                sizes[at] = amax
                continue
            rate = rates.get(at[1:])
            length = amax / rate if rate else 0.0
            own = decay * (sizes.get(at, 0.0) + amax)  # decoupled decay adds to the step
            if length > times * (bound + own) and length > (found[at[0]].rates if at[0] in found else 0.0):
                found[at[0]] = Leap(*at, text(r["module_class"]), length)
    return found


def _bound(view: RunView) -> float | None:
    """The largest bound over the groups; None unless every optimizer is torch's own Adam."""
    groups = parameter_groups(view)
    if not groups or not all(text(o.get("class")) in ADAM for o in view.optimizers):
        return None
    bounds = []
    for group in groups:
        betas = [number(b) for b in group.get("betas") or ()]
        if len(betas) != 2 or betas[0] is None or betas[1] is None:
            return None
        bounds.append(adam_bound(betas[0], betas[1]))
    return None if None in bounds else max(b for b in bounds if b is not None)


def _at(r: Mapping[str, Any], name: str) -> _At:
    return parameter_of({**r, "name": name}), *process_step(r)


def rounded_finding(
    rule: Rule, view: RunView, lost: Mapping[Parameter, Orphaned], long: Mapping[Parameter, Leap], eps: float
) -> Finding:
    """The finding about both; at least one is not empty."""
    worst = max(lost.values(), key=lambda o: o.share, default=None)
    leap = max(long.values(), key=lambda o: o.rates, default=None)
    kind, shown = ("opt_state", worst) if worst is not None else ("update", leap)
    assert shown is not None
    return rule.finding(
        confidence=0.9,
        title=_title(worst, leap),
        message=f"{_words(view, worst, leap, eps)}{plural(len(lost.keys() | long.keys()), 'parameter')} affected.",
        location=Location(
            *(shown.owner[0], shown.owner[1], shown.module_class or None, kind),
            phase=Phase.OPTIMIZER,
            rank=shown.process.rank,
            step=shown.step,
        ),
        evidence={
            "zero_under_first_moment": None if worst is None else worst.share,
            "longest_step_in_learning_rates": None if leap is None else leap.rates,
            "bound_in_learning_rates": _bound(view),
            "eps": eps,
            "parameters": [
                {
                    "parameter": label(o),
                    "zero_under_first_moment": lost[o].share if o in lost else None,
                    "step_in_learning_rates": long[o].rates if o in long else None,
                }
                for o in sorted(lost.keys() | long.keys())[:16]
            ],
            "confidence_reason": "no gradients make such moments; what changed them is not on record",
        },
        prescriptions=(_prescribe(view, worst, leap),),
    )


def _title(worst: Orphaned | None, leap: Leap | None) -> str:
    if worst is not None:
        return (
            f"{percent(worst.share)} of the second moment of `{label(worst.owner)}` is zero where the first is not: "
            "optimizer state was rounded between steps"
        )
    assert leap is not None
    return (
        f"a step moved `{label(leap.owner)}` by {leap.rates:,.3g} learning rates, more than Adam can: "
        "optimizer state was rounded or changed between steps"
    )


def _words(view: RunView, worst: Orphaned | None, leap: Leap | None, eps: float) -> str:
    words = ""
    if worst is not None:
        words += (
            f"After step {worst.step}, {plural(round(worst.elements), 'element')} of `{label(worst.owner)}` had a "
            f"second moment of exactly zero under a first moment above eps ({eps:g}); there only eps divides. "
        )
    if leap is not None:
        words += (
            f"Step {leap.step} changed an element of `{label(leap.owner)}` by {leap.rates:,.3g} times the learning "
            f"rate; from moments of the same gradients Adam makes {_bound(view):.3g} times at most. "
        )
    return words + (
        "Both moments are averages over the same gradients, and in float32 one does not vanish without the other. The "
        "state was changed between steps, as by a checkpoint saved in FP16: there second moments below 3e-8, those of "
        "gradients below 1.7e-4, are zero. "
    )


def _prescribe(view: RunView, worst: Orphaned | None, leap: Leap | None) -> Prescription:
    """Prescribe FP32 checkpoints: what changed the state is not on record, and checkpoints are where it happens."""
    predicted: dict[str, Any] = {}
    if worst is not None:
        predicted["zero_under_first_moment"] = {"from": worst.share, "to": 0.0}
    if leap is not None:
        predicted["longest_step_in_learning_rates"] = {"from": leap.rates, "to": _bound(view)}
    return Prescription(
        title="save and load the optimizer's state in FP32: no second moment is rounded to zero",
        change={"state_dtype": {"from": None, "to": "float32"}},
        predicted=predicted,
        snippet=(
            "import torch\n\n"
            "state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}  # as they are, no .half()\n"
            "torch.save(state, 'checkpoint.pt')\n"
        ),
    )
