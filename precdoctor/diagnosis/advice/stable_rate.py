"""The largest stable learning rate of diverging gradient descent, computed from how fast the gradient grows.

Along a direction of curvature ``c`` a step at the rate ``e`` multiplies the gradient by ``1 - e * c``. It grows ``r``
times per step if ``e * c`` is ``1 + r``, and keeps its size if that is 2. With momentum ``b`` it grows by the root
``-r`` of ``z**2 - (1 + b - e * c) * z + b``, so ``e * c`` is ``(1 + r) * (r + b) / r``, and the limit is
``2 * (1 + b)``.

Source: Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, arXiv:2103.00065,
section 2 and appendix B (momentum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.survey.rows import number, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import RunView

#: Fewest gradient norms; least growth from the first to the median of the last ones. Chosen empirically: batches cause
#: less.
_NORMS, _GROWN = 3, 10.0


@dataclass(frozen=True)
class StableRate:
    """The largest stable learning rate of a diverging run, and the proposed one.

    Attributes:
        first: the step from which the run diverges.
        rate: the learning rate of the run.
        growth: factor by which the gradient norm grows per step.
        limit: the largest stable rate as a share of ``rate``.
        factor: the proposed rate as a share of ``rate``, at most half of ``limit``.
        after: factor per step of the gradient along the diverging direction at the proposed rate.
    """

    first: int
    rate: float
    growth: float
    limit: float
    factor: float
    after: float

    @property
    def words(self) -> str:
        return (
            f"The gradient grows {self.growth:.3g} times per step, so the learning rate is {1.0 / self.limit:.2g} "
            f"times the largest stable one, {self.rate * self.limit:.2g}."
        )

    @property
    def evidence(self) -> dict[str, float]:
        return {"stable_rate": self.rate * self.limit, "diverges_from": self.first}

    @property
    def prescription(self) -> Prescription:
        return Prescription(
            title=f"learning rate x {self.factor:g} ({self.rate:.3g} -> {self.rate * self.factor:.3g}): the gradient "
            f"of the steepest direction is multiplied by {self.growth:.2g} -> {self.after:.2g} per step",
            change={"lr_factor": self.factor},
            predicted={"gradient_per_step": {"from": self.growth, "to": self.after}},
            snippet=snippets.lower_rate(self.factor),
        )


def stable_rate(view: RunView, steps: Sequence[StepFacts]) -> StableRate | None:
    """Compute the stable rate, for SGD with one parameter group, without clipping and at a constant rate.

    None for any other optimizer, and unless the gradient norm grows tenfold, at a steady factor per step.

    Args:
        steps: the diverging steps of one optimizer, in order.
    """
    optimizer = next((o for o in view.optimizers if steps and text(o.get("name")) == steps[0].optimizer), None)
    groups = list((optimizer or {}).get("groups") or ())
    if optimizer is None or text(optimizer.get("class")) != "SGD" or len(groups) != 1 or groups[0].get("nesterov"):
        return None
    norms = [s.grad_norm for s in steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    clipped = any(s.clip_norm is not None and s.grad_norm is not None and s.grad_norm > s.clip_norm for s in steps)
    rates = {s.lr for s in steps}
    rate, momentum = steps[0].lr, number(groups[0].get("momentum")) or 0.0
    if len(norms) < _NORMS or clipped or len(rates) > 1 or not rate or min(norms) <= 0.0 or not 0.0 <= momentum < 1.0:
        return None
    growth = median(b / a for a, b in pairwise(norms))
    if growth <= 1.0 or median(norms[-_NORMS:]) < _GROWN * norms[0]:
        return None
    if math.log(norms[-1] / norms[0]) > 2.0 * (len(norms) - 1) * math.log(growth):
        return None  # the run was stable first, so the rate is not the cause
    product = (1.0 + growth) * (growth + momentum) / growth
    limit = 2.0 * (1.0 + momentum) / product
    factor = rounded_down(limit / 2.0)
    return StableRate(steps[0].step, rate, growth, limit, factor, _per_step(product * factor, momentum))


def _per_step(product: float, momentum: float) -> float:
    """Return the gradient's factor per step: the magnitude of the larger root; ``product`` is rate times curvature."""
    middle = 1.0 + momentum - product
    inside = middle * middle - 4.0 * momentum
    return math.sqrt(momentum) if inside < 0.0 else (abs(middle) + math.sqrt(inside)) / 2.0


def rounded_down(factor: float) -> float:
    """Round down to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(factor))
    return float(f"{max(m for m in (1, 2, 5) if m * power <= factor * (1 + 1e-9)) * power:.1g}")
