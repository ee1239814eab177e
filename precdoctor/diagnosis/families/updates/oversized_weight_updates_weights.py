"""PD504: weight matrices, the size of their updates, and decay that decides the weights in place of the data.

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

from precdoctor.diagnosis.analyses.histories import newer_half, watched_steps
from precdoctor.diagnosis.analyses.optimizer_states import SCALE_FREE
from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import group_option
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import AT, PARAMETER, Ints, by_kind, finite, firsts, groups, parameters, rows_of
from precdoctor.diagnosis.survey.measures import Floats, column, share, unscaling
from precdoctor.diagnosis.survey.rows import Parameter, number, tensor_location, text
from precdoctor.diagnosis.survey.view import Process, RunView

_COLUMNS = ("module_class", "nan", "pos_inf", "neg_inf")
#: Up to this many times 1 / sqrt(n), n updates in random directions are the weight's size. Chosen empirically.
_WANDERS = 1.5

#: Optimizers whose decay does not pass through the moments, whatever their options say.
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Muon")
#: Share of a weight that the proposed decay takes away per step: an average over 10,000 steps, the strong end of the
#: range usual in pre-training (Wang and Aitchison, arXiv:2405.13698, figure 2: 10,000 to 100,000).
_USUAL = 1e-4
#: Largest proposed ratio of penalty to gradient: a hundredth leaves the direction to the data.
_SMALL = 0.01
_PENALTY_COLUMNS = ("nan", "pos_inf", "neg_inf", "scale")


@dataclass(frozen=True)
class Weight:
    """A weight matrix and its updates.

    Attributes:
        first, final: RMS before the first and before the last examined step that recorded the weight.
        ratios: RMS of each update over that of the weight (over ``base``, for the first steps), by step.
        rows: rank, attempt and step of each ratio, shape ``(ratios, 3)``.
        since: the first examined step that recorded the weight.
        base: RMS that the first updates are compared with: the initial one, or that of a usual initialisation.
        from_nothing: whether it was initialised to nothing, so that ``base`` is the usual size.
    """

    module_class: str
    first: float
    final: float
    fan_in: float
    ratios: Floats
    rows: Ints
    since: int
    base: float
    from_nothing: bool

    @property
    def left(self) -> float:
        """RMS at last over RMS at first."""
        return self.final / self.first

    @property
    def ratio(self) -> float:
        """Median ratio; the lower of two middle ones, because in a run that explodes their mean is the explosion."""
        return float(self.ratios[self._middle])

    @property
    def middle(self) -> tuple[Process, int]:
        """Process and step of the median ratio."""
        return self.place(self._middle)

    @property
    def _middle(self) -> int:
        return int(np.argsort(self.ratios, kind="stable")[(self.ratios.size - 1) // 2])

    @property
    def last(self) -> tuple[Process, int]:
        """Process and step of the last ratio."""
        return self.place(int(self.rows[:, 2].argmax()))

    def finds_its_size(self, sized: float) -> bool:
        """Return whether a weight that began at almost nothing has made so few updates that these are its size.

        Updates in random directions sum to the square root of their number.
        """
        gain = self.first * math.sqrt(self.fan_in)  # for unit noise: of order 1 with any usual initialisation
        return gain < sized and self.ratio * math.sqrt(max(1, self.middle[1] - self.since)) < _WANDERS

    def place(self, row: int) -> tuple[Process, int]:
        rank, attempt, step = self.rows[row].tolist()
        return Process(rank, attempt), step


def survey_weights(
    view: RunView, first: int | None = None, since: int = 0, sized: float = 0.0
) -> Mapping[Parameter, Weight]:
    """Return weights with ratios on the newer half of the recorded steps.

    With ``first``, ratios are those of the first so many steps from ``since`` on, to the initial RMS. A weight with
    less gain than ``sized`` then was initialised to nothing: its ratios are to the RMS of a usual initialisation.
    """
    skipped = {s.step for steps in view.timeline.values() for s in steps if s.skipped}
    steps = [s for s in watched_steps(view) if s not in skipped]
    early, begins = newer_half(view, steps) if first is None else ([s for s in steps if s >= since][:first], steps[:1])
    examined = sorted({*begins, *early, *steps[-1:]})
    rows = view.measured(("rms", "dimensions", "fan_in"), ("weight", "update"), columns=_COLUMNS, steps=examined)
    rows = rows[finite(rows) & rows["sum_sq"].notna() & (rows["dimensions"] >= 2)]
    known, (before, update) = by_kind(rows, column(rows, "rms"), ("weight", "update"))
    recorded, before, at = ~np.isnan(before), np.nan_to_num(before), known[list(AT)].to_numpy()
    counted = ~np.isnan(update) & np.isin(at[:, 2], early)
    ids = groups(known, PARAMETER)
    one = known.iloc[firsts(ids)]
    described = zip(
        parameters(one), one["module_class"], one["fan_in"], one["numel"], rows_of(ids, known["step"]), strict=True
    )
    found = {}
    for place, module_class, fan_in, numel, own in described:
        moved = own[before[own] > 0.0]
        initial = float(before[own[0]])
        nothing = bool(recorded[own[0]]) and initial * math.sqrt(fan_in) < sized
        # Without a usual size to compare with, the updates of a weight that begins at zero have the ratio 0.
        base = _usual_size(text(module_class), fan_in, numel) if nothing else initial or math.inf
        begun = own[counted[own] & (nothing | (before[own].cumsum() > 0.0))]
        chosen = moved[counted[moved]] if first is None else begun
        if chosen.size and moved.size:
            ratios = update[chosen] / (before[chosen] if first is None else base)
            sizes = initial, float(before[moved[-1]]), fan_in
            found[place] = Weight(text(module_class), *sizes, ratios, at[chosen], int(at[own[0], 2]), base, nothing)
    return found


def _usual_size(module_class: str, fan_in: float, numel: float) -> float:
    """Return the RMS of a usual initialisation: 1 / sqrt(fan-in); 1 for what is added or looked up, not multiplied."""
    looked_up = numel <= fan_in or module_class.startswith("Embedding")
    return 1.0 if looked_up else 1.0 / math.sqrt(fan_in)


# -- weight decay ------------------------------------------------------------------------------------------------------


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
    rows = view.measured(("rms",), ("weight", "weight_grad_step"), columns=_PENALTY_COLUMNS, steps=watched_steps(view))
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
