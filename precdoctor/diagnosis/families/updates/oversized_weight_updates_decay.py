"""Weight decay so strong that the weights forget their initialisation and the data, and shrink to nothing.

Decoupled decay takes the share ``lr * weight_decay`` of a weight away on every step, and with L2 regularisation SGD
does as much (over ``1 - momentum``). The weight is then an average over about the inverse of that share of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.parameters import parameter_label
from precdoctor.diagnosis.survey.rows import number, text
from precdoctor.diagnosis.survey.view import RunView

#: Optimizers whose decay does not pass through the moments, whatever their options say.
_DECOUPLED = ("AdamW", "Lion", "SGDW", "Muon")
#: Share of a weight that the proposed decay takes away per step. An average over 10 000 steps: among the usual ones of
#: pre-training, from 10 000 to 100 000 (Wang and Aitchison, arXiv:2405.13698, figure 2).
USUAL = 1e-4
_Place = tuple[str, str, str]


@dataclass(frozen=True)
class Decay:
    """Attributes:
    optimizer: its name.
    weight_decay, rate: of the group that decays most, the rate in the median of the newer half.
    share: of a weight that goes on every step.
    """

    optimizer: str
    weight_decay: float
    rate: float
    share: float

    @property
    def steps(self) -> float:
        """After so many, a weight that gets no gradient is down to 1/e."""
        return 1.0 / self.share


def strongest_decay(view: RunView) -> Decay | None:
    """Of the optimizers whose weights decay by a share that the settings tell; None without one."""
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


def is_decoupled(kind: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer of this class decays the weights of a parameter group beside the gradient."""
    return kind in _DECOUPLED or bool(group.get("decoupled_weight_decay"))


def _factor(kind: str, group: Mapping[str, Any]) -> float:
    """What a step takes away, in units of lr * weight_decay; 0 where the gradient's size is divided out again."""
    if is_decoupled(kind, group):
        return 1.0
    momentum = number(group.get("momentum")) or 0.0
    return 1.0 / (1.0 - momentum) if kind == "SGD" and momentum < 1.0 else 0.0


def finding(view: RunView, decay: Decay, shrunk: Mapping[_Place, tuple[str, float, float]], limit: float) -> Finding:
    """What is told of it.

    Args:
        view: the run.
        decay: of the optimizer.
        shrunk: per weight matrix its module's class, and its RMS at first and at last.
        limit: the share per step that is too much.
    """
    place, (module_class, first, last) = min(shrunk.items(), key=lambda item: (item[1][2] / item[1][1], item[0]))
    after = 10.0 ** math.floor(math.log10(USUAL / decay.share) + 1e-9) * decay.weight_decay
    longer = decay.steps * decay.weight_decay / after
    process, timeline = next(iter(view.timeline.items()))
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.85,
        title=f"weight decay takes {percent(decay.share)} of every weight away per step: "
        f"`{parameter_label(*place)}` is down to {percent(last / first)} of its initial size",
        message=(
            f"{decay.optimizer} runs at weight decay {decay.weight_decay:g} and a learning rate of {decay.rate:.3g}: "
            f"their product, {decay.share:.2g} per step (limit {limit:g}), lets a weight remember about "
            f"{decay.steps:,.0f} steps. "
            f"{plural(len(shrunk), 'weight matrix')} shrank to a half or less; `{parameter_label(*place)}` from RMS "
            f"{first:.2g} to {last:.2g}. Gradients no longer balance the decay."
        ),
        location=Location(
            *(place[0], place[1], module_class or None, "weight"),
            phase=Phase.OPTIMIZER,
            rank=process.rank,
            step=timeline[-1].step,
        ),
        evidence={
            "decay_per_step": decay.share,
            "limit": limit,
            "weight_decay": decay.weight_decay,
            "lr": decay.rate,
            "memory_steps": decay.steps,
            "shrunk": [
                {"parameter": parameter_label(*p), "rms": {"first": a, "last": b}}
                for p, (_, a, b) in sorted(shrunk.items(), key=lambda item: item[1][2] / item[1][1])[:16]
            ],
            "confidence_reason": "the settings are on record, and the weights shrank as they say",
        },
        prescriptions=(
            Prescription(
                title=f"weight decay {decay.weight_decay:g} -> {after:.2g}: a weight remembers {decay.steps:,.0f} -> "
                f"{longer:,.0f} steps",
                change={"weight_decay": {"from": decay.weight_decay, "to": after}},
                predicted={"memory_steps": {"from": decay.steps, "to": longer}},
                snippet=f"for group in optimizer.param_groups:\n    group['weight_decay'] = {after:.2g}\n",
            ),
        ),
    )
