"""PD606: a learned scale of the output's logits (an inverse temperature) beyond the bound that CLIP clamps it to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.families.growth.logit_growth_histories import LogitHistory
from precdoctor.diagnosis.survey.frames import Ints, courses
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Key, Parameter, dotted, tensor_location
from precdoctor.diagnosis.survey.view import Process, RunView

#: How scripts make a scale of a parameter ``p``: the function, its text, and the clamp of ``p`` that bounds the scale.
_FORMS: tuple[tuple[Callable[[Floats], Floats], str, str], ...] = (
    (np.exp, "exp({})", "clamp_(max=math.log({:g}))"),
    (np.abs, "{}", "clamp_(max={:g})"),
    (lambda p: 1.0 / np.abs(p), "1 / {}", "clamp_(min=1 / {:g})"),
)
#: Cosines lie within [-1, 1]: the largest logit is at most the scale, but for rounding, and not far below it.
_ROUNDING, _LEAST_COSINE = 1.02, 0.3
#: How far beyond the bound a scale must be: a clamp in BF16 may round up.
_BEYOND = 1.02


@dataclass(frozen=True)
class LearnedScale:
    """A parameter of one element that scales cosines to the logits of a softmax; ``scales``: on each of ``steps``."""

    place: Parameter
    process: Process
    softmax: Key
    history: LogitHistory
    steps: Ints
    scales: Floats
    words: str
    clamp: str

    @property
    def first(self) -> float:
        """The scale on the first recorded step."""
        return float(self.scales[0])

    @property
    def last(self) -> float:
        """The scale on the last recorded step."""
        return float(self.scales[-1])


def learned_scale_beyond(
    view: RunView, histories: Mapping[Key, LogitHistory], bound: float, least: int
) -> LearnedScale | None:
    """Return the largest learned scale of output logits that passed ``bound`` and still rises; None if there is none.

    Args:
        least: fewest steps on which both the scale and the logits were recorded.
    """
    outputs = {key: h for key, h in histories.items() if h.role == "output"}
    if not outputs:
        return None
    rows = view.measured((), ("weight",), columns=("numel", "sum"), where=[("numel", "==", 1)])
    found = []
    for place, process, _, own in courses(rows, ("numel",)):
        steps, values = rows["step"].to_numpy()[own], column(rows, "sum")[own]
        for (key, history), (make, words, clamp) in itertools.product(outputs.items(), _FORMS):
            both, mine, its = np.intersect1d(steps, history.steps, return_indices=True)
            with np.errstate(over="ignore", divide="ignore"):
                scales = make(values[mine])
            if both.size >= least and _scales_cosines(scales, history.levels[its]) and _has_passed(scales, bound):
                said = words.format(dotted(*place[1:]))
                found.append(LearnedScale(place, process, key, history, both, scales, said, clamp.format(bound)))
    return max(found, key=lambda s: s.last, default=None)


def _scales_cosines(scales: Floats, levels: Floats) -> bool:
    """Return whether the largest logit follows the scale as the largest of many cosines times it does."""
    known = np.isfinite(scales).all() and (levels <= _ROUNDING * scales).all()
    return bool(known and np.median(levels / scales) >= _LEAST_COSINE)


def _has_passed(scales: Floats, bound: float) -> bool:
    """Return whether the scale is beyond the bound on the newest steps, and higher than in the middle of the run."""
    return bool(scales[-1] > _BEYOND * bound and scales[-1] > scales[scales.size // 2])


def scale_finding(rule: Rule, scale: LearnedScale, bound: float) -> Finding:
    """Return the finding about a learned scale that nothing holds."""
    _, module, name = scale.place
    imports = "import math\n\nimport torch" if "math." in scale.clamp else "import torch"
    begun, last = scale.steps[[0, -1]].tolist()
    above = scale.steps[scale.scales > _BEYOND * bound]
    return rule.finding(
        confidence=0.7,
        title=f"the learned scale of the logits, {scale.words}, has passed {bound:g} and still rises",
        message=f"{scale.words} went from {scale.first:.3g} at step {begun} to {scale.last:.3g} at step {last} (limit "
        f"{bound:g}, where CLIP clamps it); the largest logit is {scale.history.last:.3g}. A scale that nothing holds "
        "grows for as long as it makes the loss of the training data smaller: gradients of all but the hardest "
        "pairs vanish, and wrong answers on held-out data cost more and more.",
        location=tensor_location(scale.place, "", "weight", Phase.LOSS, scale.process, int(above[0])),
        evidence={
            "state": "scale",
            "role": "output",
            "scale": scale.last,
            "scale_at_first": scale.first,
            "max_logit": scale.history.last,
            "limit": bound,
            "last_bad_step": last,
            "softmax": dotted(scale.softmax[1], scale.softmax[3]),
            "confidence_reason": "the logits follow the scale on every recorded step; some losses bear a larger one",
        },
        prescription=Prescription(
            title=f"clamp it after each step: scale {scale.last:.3g} -> {bound:g}",
            change={"parameter": dotted(module, name), "max_scale": bound},
            predicted={"scale": {"from": float(f"{scale.last:.4g}"), "to": bound}},
            snippet=(
                f"{imports}\n\n"
                "with torch.no_grad():  # after optimizer.step()\n"
                f"    {module_expression(module)}.{name}.{scale.clamp}\n"
            ),
        ),
    )
