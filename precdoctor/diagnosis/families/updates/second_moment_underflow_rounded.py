"""PD506, rounded state: Adam's second moment is zero under a first moment that is not, because state was rounded.

Both moments are averages over the same gradients, so that the second one bounds the first. State that goes through a
narrower format between steps (a checkpoint saved in FP16) keeps the first moment, of the gradient's size, and loses the
second, of its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.optimizer_states import adds_eps_to_root, states
from precdoctor.diagnosis.analyses.parameters import ADAM, parameter_groups, parameter_label
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import (
    PARAMETER,
    at,
    by_kind,
    groups,
    histograms,
    pairs,
    parameters,
    rows_of,
    step_values,
)
from precdoctor.diagnosis.survey.measures import column, share
from precdoctor.diagnosis.survey.rows import Parameter, number, tensor_location, text
from precdoctor.diagnosis.survey.view import Process, RunView

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_COLUMNS = ("module_class", "dtype", "numel", "zero", "exp_lo", "exp_hist")
_ROUNDED = (
    "Both moments are averages over the same gradients, and in float32 one does not vanish without the other. The "
    "state was changed between steps, as by a checkpoint saved in FP16: there second moments below 3e-8, those of "
    "gradients below 1.7e-4, are zero. "
)
#: Checkpoints are the usual place; the log does not show what changed the state.
_IN_FP32 = (
    "import torch\n\n"
    "state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}  # as they are, no .half()\n"
    "torch.save(state, 'checkpoint.pt')\n"
)


@dataclass(frozen=True)
class Sign:
    """A parameter, and the step that shows that its state was rounded.

    Either elements are *orphaned* after the step, with a first moment above eps and a second moment of exactly zero; or
    the step is a *leap*, longer than Adam can make it.

    Attributes:
        elements: least number of orphaned elements; 1 for a leap.
        size: share of orphaned elements, or length of the leap in learning rates, ``|dw| / lr``.
    """

    owner: Parameter
    process: Process
    step: int
    module_class: str
    elements: float
    size: float

    @property
    def name(self) -> str:
        """The name of the parameter in messages."""
        return parameter_label(self.owner)


def adam_bound(beta1: float, beta2: float) -> float | None:
    """Length of Adam's longest possible step in learning rates, whatever its gradients; None if there is no bound.

    By Cauchy and Schwarz ``m^2 <= v * sum over k of (1 - beta1)^2 beta1^2k / ((1 - beta2) beta2^k)``, a geometric
    series. Bias correction shortens it with the usual settings. For 0.9 and 0.999 it is 7.27; Kingma and Ba
    (arXiv:1412.6980, section 2.1) give 3.16 for a single gradient.
    """
    if not 0.0 <= beta1 < 1.0 or not beta1**2 < beta2 < 1.0:
        return None
    return max(1.0, (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1**2 / beta2)))


def orphaned(view: RunView, eps: float, least_share: float, least: float) -> dict[Parameter, Sign]:
    """Return FP32 parameters with ``least`` orphaned elements, and ``least_share`` of all, at their first such step."""
    if not adds_eps_to_root(view):
        return {}
    rows = states(view.measured((), ("opt_state",), columns=_COLUMNS, where=[("dtype", "==", "float32")]))
    second, first = pairs(rows.assign(kind=rows["key"]), _SECOND, _FIRST)
    above, numel = histograms(first), column(second, "numel")
    lost = above.total - above.at_most(np.full(numel.size, eps))[1] - (numel - column(second, "zero"))
    chosen = (
        (column(second, "zero") > 0.0)
        & (column(first, "numel") == numel)
        & (lost >= np.maximum(least, least_share * numel))
    )
    found = second.assign(elements=lost, size=lost / np.maximum(numel, 1.0))[chosen]
    return _first_signs(found, found["step"])


def leaps(view: RunView, times: float) -> dict[Parameter, Sign]:
    """Return FP32 weights with a step more than ``times`` longer than Adam can make it, each on its longest step."""
    bound = _longest_adam_step(view)
    if bound is None:
        return {}
    decay = max(number(g.get("weight_decay")) or 0.0 for g in parameter_groups(view))
    rates: dict[tuple[Process, int], float] = {}
    for process, steps in view.timeline.items():
        for s in steps:
            if s.lr and not s.skipped:
                rates[process, s.step] = max(s.lr, rates.get((process, s.step), 0.0))
    rows = view.measured((), ("weight", "update"), columns=("module_class", "dtype", "amax"))
    rows = rows[(rows["dtype"] == "float32") & rows["amax"].notna()]
    known, (size, change) = by_kind(rows, column(rows, "amax"), ("weight", "update"))
    length = share(change, step_values(known, rates))
    own = decay * (np.nan_to_num(size) + change)  # decoupled decay adds this many learning rates to the step
    found = known.assign(elements=1.0, size=length)[length > times * (bound + own)]
    return _first_signs(found, -found["size"])


def _first_signs(rows: pd.DataFrame, order: pd.Series[Any]) -> dict[Parameter, Sign]:
    """Return the sign in each weight's first row by ``order``."""
    first = rows.iloc[[own[0] for own in rows_of(groups(rows, PARAMETER), order)]]
    columns = parameters(first), at(first), first["module_class"].map(text), first["elements"], first["size"]
    return {place: Sign(place, *of, *own) for place, of, *own in zip(*columns, strict=True)}


def _longest_adam_step(view: RunView) -> float | None:
    """Return Adam's longest step over all groups; None without a bound, or if an optimizer is not torch's Adam."""
    groups = parameter_groups(view)
    if not groups or not all(text(o.get("class")) in ADAM for o in view.optimizers):
        return None
    bounds: list[float] = []
    for group in groups:
        betas = [b for b in map(number, group.get("betas") or ()) if b is not None]
        bound = adam_bound(*betas) if len(betas) == 2 else None
        if bound is None:
            return None
        bounds.append(bound)
    return max(bounds)


def rounded_finding(
    rule: Rule, view: RunView, lost: Mapping[Parameter, Sign], long: Mapping[Parameter, Sign], eps: float
) -> Finding:
    """Return one finding about orphaned elements (``lost``) and leaps (``long``); at least one is not empty."""
    worst, leap = (max(signs.values(), key=lambda o: o.size, default=None) for signs in (lost, long))
    bound, titles, words = _longest_adam_step(view), [], ""
    predicted: dict[str, Any] = {}
    if worst is not None:
        titles.append(
            f"{percent(worst.size)} of the second moment of `{worst.name}` is zero where the first is not: "
            "optimizer state was rounded between steps"
        )
        words += (
            f"After step {worst.step}, {plural(round(worst.elements), 'element')} of `{worst.name}` had a "
            f"second moment of exactly zero under a first moment above eps ({eps:g}); there only eps divides. "
        )
        predicted["zero_under_first_moment"] = {"from": worst.size, "to": 0.0}
    if leap is not None:
        titles.append(
            f"a step moved `{leap.name}` by {leap.size:,.3g} learning rates, more than Adam can: "
            "optimizer state was rounded or changed between steps"
        )
        words += (
            f"Step {leap.step} changed an element of `{leap.name}` by {leap.size:,.3g} times the learning "
            f"rate; from moments of the same gradients Adam makes {bound:.3g} times at most. "
        )
        predicted["longest_step_in_learning_rates"] = {"from": leap.size, "to": bound}
    kind, shown = ("opt_state", worst) if worst is not None else ("update", leap)
    assert shown is not None
    every = lost.keys() | long.keys()
    return rule.finding(
        confidence=0.9,
        title=titles[0],
        message=f"{words}{_ROUNDED}{plural(len(every), 'parameter')} affected.",
        location=tensor_location(shown.owner, shown.module_class, kind, Phase.OPTIMIZER, shown.process, shown.step),
        evidence={
            "zero_under_first_moment": None if worst is None else worst.size,
            "longest_step_in_learning_rates": None if leap is None else leap.size,
            "bound_in_learning_rates": bound,
            "eps": eps,
            "parameters": [
                {
                    "parameter": parameter_label(o),
                    "zero_under_first_moment": lost[o].size if o in lost else None,
                    "step_in_learning_rates": long[o].size if o in long else None,
                }
                for o in sorted(every)[:16]
            ],
            "confidence_reason": "no gradients make such moments; what changed them is not on record",
        },
        prescription=Prescription(
            title="save and load the optimizer's state in FP32: no second moment is rounded to zero",
            change={"state_dtype": {"from": None, "to": "float32"}},
            predicted=predicted,
            snippet=_IN_FP32,
        ),
    )
