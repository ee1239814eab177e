"""L2 regularisation that outweighs the gradient under an optimizer that divides by the gradient's size.

There ``weight_decay`` adds ``weight_decay * w`` to the gradient, and the sum is divided by its own size. Where the
penalty is the larger part, every element moves towards zero by about the learning rate per step, however small the
gradient or the penalty are (Loshchilov and Hutter, arXiv:1711.05101, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.oversized_weight_updates_decay import is_decoupled
from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.optimizer_states import SCALE_FREE
from precdoctor.diagnosis.survey.parameters import parameter_label
from precdoctor.diagnosis.survey.rows import number, text
from precdoctor.diagnosis.survey.view import RunView

#: Of the gradient, what the proposed penalty is at most. A hundredth leaves the direction to the data.
_SMALL = 0.01
_COLUMNS = ("root", "module", "name", "kind", "numel", "nan", "pos_inf", "neg_inf", "sum_sq", "scale")
_Place = tuple[str, str, str]


@dataclass(frozen=True)
class Penalty:
    """Attributes:
    optimizer: its name.
    weight_decay: of the group that is penalised most.
    """

    optimizer: str
    weight_decay: float


@dataclass(frozen=True)
class Outweighed:
    """RMS of the penalty's gradient over that of the loss's, on the first recorded step and in the newer half."""

    first: float
    newer: float


def strongest_penalty(view: RunView) -> Penalty | None:
    """Of the optimizers that add it to the gradient and divide by the sum's size; None without one."""
    found = [
        Penalty(text(o.get("name")), decay)
        for o in view.optimizers
        if (kind := text(o.get("class"))) in SCALE_FREE
        for g in o.get("groups") or ()
        if not is_decoupled(kind, g) and (decay := number(g.get("weight_decay")))
    ]
    return max(found, key=lambda p: p.weight_decay, default=None)


def finding(
    view: RunView,
    penalty: Penalty,
    shrunk: Mapping[_Place, tuple[str, float, float]],
    least: int,
    limit: float,
) -> Finding | None:
    """What is told of it; None where it does not outweigh the gradients of so many matrices.

    Args:
        view: the run.
        penalty: of the optimizer.
        shrunk: per weight matrix its module's class, and its RMS at first and at last.
        least: of these, at least so many must be outweighed.
        limit: the ratio that is too much.
    """
    ratios = {p: r for p, r in _outweighed(view, penalty, shrunk).items() if r.newer >= limit}
    shrunk = {p: shrunk[p] for p in ratios}
    if not shrunk or len(shrunk) < least:
        return None
    place, (module_class, first, last) = min(shrunk.items(), key=lambda item: (item[1][2] / item[1][1], item[0]))
    parameter, ratio = parameter_label(*place), ratios[place]
    process, timeline = next(iter(view.timeline.items()))
    rate = next((s.lr for s in reversed(timeline) if s.lr), None)
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.85,
        title=f"L2 regularisation outweighs the gradient of `{parameter}` {ratio.newer:,.3g} times: "
        f"it is down to {percent(last / first)} of its initial size",
        message=(
            f"{penalty.optimizer} adds the weight, times a weight decay of {penalty.weight_decay:g}, to the gradient "
            f"and divides by the size of the sum. For {plural(len(shrunk), 'weight matrix')} the penalty is {limit:g} "
            f"times the gradient or more in the median of the newer half (`{parameter}`: {ratio.first:.3g} times at "
            f"first, {ratio.newer:.3g} then), so that their elements go to zero by about the learning rate"
            + (f", {rate:.3g}," if rate else "")
            + f" per step, whatever the data say. They shrank to a half or less; `{parameter}` from RMS {first:.2g} to "
            f"{last:.2g}."
        ),
        location=Location(
            *(place[0], place[1], module_class or None, "weight"),
            phase=Phase.OPTIMIZER,
            rank=process.rank,
            step=timeline[-1].step,
        ),
        evidence={
            "penalty_to_gradient": {"first": ratio.first, "newer_half": ratio.newer},
            "limit": limit,
            "weight_decay": penalty.weight_decay,
            "lr": rate,
            "shrunk": [
                {
                    "parameter": parameter_label(*p),
                    "rms": {"first": a, "last": b},
                    "penalty_to_gradient": ratios[p].newer,
                }
                for p, (_, a, b) in sorted(shrunk.items(), key=lambda item: item[1][2] / item[1][1])[:16]
            ],
            "confidence_reason": "penalty and gradient are known of the same steps, and the weights shrank as they say",
        },
        prescriptions=(_prescribe(penalty, max(r.first for r in ratios.values())),),
    )


def _prescribe(penalty: Penalty, before: float) -> Prescription:
    """A power of ten at which the penalty is small against the first gradients."""
    factor = min(0.1, 10.0 ** math.floor(math.log10(_SMALL / before) + 1e-9)) if before > 0.0 else 0.1
    after = penalty.weight_decay * factor
    return Prescription(
        title=f"weight decay {penalty.weight_decay:g} -> {after:.2g}: penalty / gradient at first "
        f"{before:.2g} -> {before * factor:.1g}",
        change={"weight_decay": {"from": penalty.weight_decay, "to": after}},
        predicted={"penalty_to_gradient": {"from": before, "to": before * factor}},
        snippet=f"for group in optimizer.param_groups:\n    group['weight_decay'] = {after:.2g}\n",
    )


def _outweighed(view: RunView, penalty: Penalty, weights: Mapping[_Place, object]) -> Mapping[_Place, Outweighed]:
    """Of these weights, those whose size and gradient were recorded on the same steps."""
    rms: dict[_Place, dict[tuple[int, int, int], dict[str, float]]] = {}
    for r in view.scan_records(_COLUMNS, ("weight", "weight_grad_step"), steps=watched_steps(view)):
        energy, place = number(r["sum_sq"]), (str(r["root"]), str(r["module"]), str(r["name"]))
        if energy is None or place not in weights or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        size = math.sqrt(energy / max(1, int(r["numel"]))) / (number(r["scale"]) or 1.0)
        at = int(r["step"]), int(r["rank"]), int(r["attempt"])
        rms.setdefault(place, {}).setdefault(at, {})[str(r["kind"])] = size
    found = {}
    for place, steps in rms.items():
        ratios = [
            penalty.weight_decay * sizes["weight"] / sizes["weight_grad_step"]
            for _, sizes in sorted(steps.items())
            if "weight" in sizes and sizes.get("weight_grad_step")
        ]
        if ratios:
            found[place] = Outweighed(ratios[0], median(ratios[len(ratios) // 2 :]))
    return found
