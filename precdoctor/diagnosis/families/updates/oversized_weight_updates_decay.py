"""PD504, weight decay: decay or an L2 penalty so strong that it, and not the data, decides the weights.

Decoupled decay takes the share ``lr * weight_decay`` of a weight away on every step, and SGD with L2 regularisation
``lr * weight_decay / (1 - momentum)``: the weight is an average over the last 1 / share steps, about. Optimizers that
divide by the gradient's size add ``weight_decay * w`` to the gradient first. If this penalty is larger than the
gradient, every element moves towards zero by about the learning rate per step, however small both are (Loshchilov and
Hutter, arXiv:1711.05101, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.analyses.optimizer_states import SCALE_FREE
from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import group_option
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.oversized_weight_updates_weights import Weight
from precdoctor.diagnosis.survey.frames import PARAMETER, by_kind, finite, firsts, groups, parameters, rows_of
from precdoctor.diagnosis.survey.measures import column, share, unscaling
from precdoctor.diagnosis.survey.rows import Parameter, number, tensor_location, text
from precdoctor.diagnosis.survey.view import RunView

#: Optimizers whose decay does not pass through the moments, whatever their options say.
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Muon")
#: Share of a weight that the proposed decay takes away per step: an average over 10,000 steps, the strong end of the
#: range usual in pre-training (Wang and Aitchison, arXiv:2405.13698, figure 2: 10,000 to 100,000).
_USUAL = 1e-4
#: Largest proposed ratio of penalty to gradient: a hundredth leaves the direction to the data.
_SMALL = 0.01
_COLUMNS = ("nan", "pos_inf", "neg_inf", "scale")


@dataclass(frozen=True)
class Decay:
    """The parameter group that decays most.

    Attributes:
        optimizer: its name.
        rate: learning rate, median over the newer half of its steps.
        share: share of a weight that one step takes away.
    """

    optimizer: str
    weight_decay: float
    rate: float
    share: float

    @property
    def steps(self) -> float:
        """Number of steps after which a weight without a gradient is down to 1/e."""
        return 1.0 / self.share


def strongest_decay(view: RunView) -> Decay | None:
    """Return the parameter group whose decay takes most of a weight away per step; None without a known share."""
    found = []
    for optimizer in view.optimizers:
        name = text(optimizer.get("name"))
        rates = [s.lr for steps in view.timeline.values() for s in steps if s.optimizer == name and s.lr]
        newer = rates[len(rates) // 2 :]
        for group in optimizer.get("groups") or ():
            decay = number(group.get("weight_decay"))
            if decay and newer and (factor := _factor(text(optimizer.get("class")), group)):
                rate = median(newer)
                found.append(Decay(name, decay, rate, rate * decay * factor))
    return max(found, key=lambda d: d.share, default=None)


def strongest_penalty(view: RunView) -> tuple[float, str] | None:
    """Return the largest weight decay that an optimizer adds to a gradient whose size it divides by, and its name."""
    found = [
        (decay, text(o.get("name")))
        for o in view.optimizers
        if (kind := text(o.get("class"))) in SCALE_FREE
        for g in o.get("groups") or ()
        if not _is_decoupled(kind, g) and (decay := number(g.get("weight_decay")))
    ]
    return max(found, key=lambda p: p[0], default=None)


def _is_decoupled(kind: str, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of class ``kind`` decays this group's weights directly, not via the gradient."""
    return kind in _DECOUPLED or bool(group.get("decoupled_weight_decay"))


def _factor(kind: str, group: Mapping[str, Any]) -> float:
    """Return the share of a weight that one step takes away, in units of lr * weight_decay.

    0 if the optimizer divides the gradient, and with it the decay, by its size, or is not known.
    """
    if _is_decoupled(kind, group):
        return 1.0
    momentum = number(group.get("momentum")) or 0.0
    return 1.0 / (1.0 - momentum) if kind == "SGD" and momentum < 1.0 else 0.0


def decay_finding(rule: Rule, view: RunView, decay: Decay, shrunk: Mapping[Parameter, Weight], limit: float) -> Finding:
    """Return the finding about decay above ``limit`` per step, located at the matrix that shrank most."""
    place, worst = _worst(shrunk)
    after = 10.0 ** math.floor(math.log10(_USUAL / decay.share) + 1e-9) * decay.weight_decay
    longer = decay.steps * decay.weight_decay / after
    return rule.finding(
        confidence=0.85,
        title=f"weight decay takes {percent(decay.share)} of every weight away per step: "
        f"`{parameter_label(place)}` is down to {percent(worst.left)} of its initial size",
        message=f"{decay.optimizer} runs at weight decay {decay.weight_decay:g} and a learning rate of "
        f"{decay.rate:.3g}: a weight loses the share {decay.share:.2g} per step (limit {limit:g}) and can remember "
        f"about {decay.steps:,.0f} steps. {_shrunk_words(place, worst, shrunk)} Gradients no longer balance the decay.",
        location=_location(view, place, worst),
        evidence={
            "decay_per_step": decay.share,
            "limit": limit,
            "weight_decay": decay.weight_decay,
            "lr": decay.rate,
            "memory_steps": decay.steps,
            "shrunk": [{"parameter": p, "rms": rms} for _, p, rms in _most_shrunk(shrunk)],
            "confidence_reason": "the settings are on record, and the weights shrank as the settings predict",
        },
        prescription=_weaker(
            decay.weight_decay,
            after,
            f"a weight remembers {decay.steps:,.0f} -> {longer:,.0f} steps",
            {"memory_steps": {"from": decay.steps, "to": longer}},
        ),
    )


def penalty_finding(
    rule: Rule, view: RunView, penalty: tuple[float, str], shrunk: Mapping[Parameter, Weight], least: int, limit: float
) -> Finding | None:
    """Return the finding about penalties of ``limit`` times the gradient; None unless ``least`` matrices have one."""
    decay, optimizer = penalty
    every = _penalty_to_gradient(view, decay, shrunk)
    ratios = {p: r for p, r in every.items() if r[1] >= limit}
    shrunk = {p: shrunk[p] for p in ratios}
    if len(shrunk) < least:
        return None
    place, worst = _worst(shrunk)
    parameter, (first, newer) = parameter_label(place), ratios[place]
    rate = next((s.lr for s in reversed(next(iter(view.timeline.values()))) if s.lr), None)
    return rule.finding(
        confidence=0.85,
        title=f"L2 regularisation outweighs the gradient of `{parameter}` {newer:,.3g} times: "
        f"it is down to {percent(worst.left)} of its initial size",
        message=(
            f"{optimizer} adds weight decay {decay:g} times the weight to the gradient and "
            f"divides by the size of the sum. For {plural(len(shrunk), 'weight matrix')} the penalty is {limit:g} "
            f"times the gradient or more in the median of the newer half (`{parameter}`: {first:.3g} times at first, "
            f"{newer:.3g} then). Their elements go to zero by about the learning rate"
            + (f", {rate:.3g}," if rate else "")
            + f" per step, whatever the data say. {_shrunk_words(place, worst, shrunk)}"
        ),
        location=_location(view, place, worst),
        evidence={
            "penalty_to_gradient": {"first": first, "newer_half": newer},
            "limit": limit,
            "weight_decay": decay,
            "lr": rate,
            "shrunk": [
                {"parameter": name, "rms": rms, "penalty_to_gradient": ratios[p][1]}
                for p, name, rms in _most_shrunk(shrunk)
            ],
            "confidence_reason": "penalty and gradient are known on the same steps, and the weights shrank accordingly",
        },
        prescription=_weaker_penalty(decay, max(first for first, _ in ratios.values())),
    )


def _weaker_penalty(decay: float, before: float) -> Prescription:
    """Prescribe a weight decay, smaller by a power of ten, whose penalty is small against the first gradients."""
    factor = min(0.1, 10.0 ** math.floor(math.log10(_SMALL / before) + 1e-9)) if before > 0.0 else 0.1
    effect = f"penalty / gradient at first {before:.2g} -> {before * factor:.1g}"
    predicted = {"penalty_to_gradient": {"from": before, "to": before * factor}}
    return _weaker(decay, decay * factor, effect, predicted)


def _weaker(before: float, after: float, effect: str, predicted: Mapping[str, Any]) -> Prescription:
    return Prescription(
        title=f"weight decay {before:g} -> {after:.2g}: {effect}",
        change={"weight_decay": {"from": before, "to": after}},
        predicted=predicted,
        snippet=group_option("weight_decay", f"{after:.2g}"),
    )


def _penalty_to_gradient(
    view: RunView, decay: float, weights: Mapping[Parameter, Weight]
) -> Mapping[Parameter, tuple[float, float]]:
    """Return RMS of penalty over RMS of gradient by weight: on the first step with both, and in the newer half.

    Weights without a step with both are left out.
    """
    rows = view.measured(("rms",), ("weight", "weight_grad_step"), columns=_COLUMNS, steps=watched_steps(view))
    rows = rows[finite(rows) & rows["sum_sq"].notna()]
    by_weight, (weight, gradient) = by_kind(
        rows, share(column(rows, "rms"), unscaling(rows)), ("weight", "weight_grad_step")
    )
    by_weight = by_weight.assign(ratio=share(decay * weight, gradient))
    by_weight = by_weight[by_weight["ratio"].notna()].sort_values(["step", "rank", "attempt"], kind="stable")
    first_and_newer = {}
    ratios, ids = column(by_weight, "ratio"), groups(by_weight, PARAMETER)
    for place, own in zip(parameters(by_weight.iloc[firsts(ids)]), rows_of(ids), strict=True):
        if place in weights:
            first_and_newer[place] = float(ratios[own[0]]), float(np.median(ratios[own[own.size // 2 :]]))
    return {place: first_and_newer[place] for place in weights if place in first_and_newer}


def _worst(shrunk: Mapping[Parameter, Weight]) -> tuple[Parameter, Weight]:
    return min(shrunk.items(), key=lambda item: (item[1].left, item[0]))


def _shrunk_words(place: Parameter, worst: Weight, shrunk: Mapping[Parameter, Weight]) -> str:
    return (
        f"{plural(len(shrunk), 'weight matrix')} shrank to a half or less; `{parameter_label(place)}` from RMS "
        f"{worst.first:.2g} to {worst.final:.2g}."
    )


def _most_shrunk(shrunk: Mapping[Parameter, Weight]) -> list[tuple[Parameter, str, dict[str, float]]]:
    ordered = sorted(shrunk.items(), key=lambda item: item[1].left)[:16]
    return [(p, parameter_label(p), {"first": s.first, "last": s.final}) for p, s in ordered]


def _location(view: RunView, place: Parameter, worst: Weight) -> Location:
    process, steps = next(iter(view.timeline.items()))
    return tensor_location(place, worst.module_class, "weight", Phase.OPTIMIZER, process, steps[-1].step)
