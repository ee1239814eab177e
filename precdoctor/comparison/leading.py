"""Leading indicators: compares a running training with a healthy run of the same training, for ``record --reference``.

Gradient amax growing faster, the second moment of gradients drifting, the loss above the reference: each changes before
a run breaks, though none is a fault itself. Runs are paired by step, so that warm-up and decay of the learning rate
cancel. Seeds and data order may differ, so only medians over a window are compared, never single steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from precdoctor.comparison.compare import LOSS_GAP
from precdoctor.comparison.regressions import Regression
from precdoctor.comparison.spread import GAUSSIAN_MAD
from precdoctor.comparison.steps import mean_losses, usable_steps
from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import IDENTITY, RunView

#: Most common steps to compare, the newest ones, and the fewest for a comparison.
WINDOW, FEWEST = 32, 16
#: Growth of a gradient's amax over the reference's, in binades between the first and the last quarter of the window.
GROWTH = 2.0
#: E[g²] over the reference's, in binades (a factor of 16), in the median over the window.
DRIFT = 4.0
#: Smallest difference of losses that counts, in standard errors of the difference.
SIGNIFICANT = 4.0
#: Steps that a run may be behind the reference, as a share of the steps so far (at least a window).
LAG = 0.1


_PAIRED = f"Held over the newest {WINDOW} steps that both runs have, {FEWEST} at least."
_CHECKED = "Checked while a run goes on by record --reference."
INDICATORS: tuple[Regression, ...] = (
    Regression(
        "PD821", "loss-above-reference", Severity.WARNING,
        f"The loss is above what the reference has there, and had a tenth of the steps before, by more than {LOSS_GAP} "
        f"nats in the median and more than {SIGNIFICANT:g} standard errors of the difference. {_PAIRED}",
        checked=_CHECKED,
    ),
    Regression(
        "PD822", "gradient-growing-faster", Severity.WARNING,
        f"The amax of a gradient grew {GROWTH:g} binades more than the reference's between the first and the last "
        f"quarter of the window, and stands above it. {_PAIRED}",
        checked=_CHECKED,
    ),
    Regression(
        "PD823", "second-moment-drift", Severity.WARNING,
        f"The mean square of a gradient is {DRIFT:g} binades (a factor of {2.0**DRIFT:g}) from the reference's in the "
        f"median. {_PAIRED}",
        checked=_CHECKED,
    ),
)  # fmt: skip
CODES: Mapping[str, str] = {i.code: i.name for i in INDICATORS}

#: Amax and mean square of unscaled gradients, indexed by tensor and step.
Course = pd.DataFrame
#: A gradient that left its reference: log2(run / reference) by step, and the value compared with the limit, in binades.
_Moved = tuple[Key, dict[int, float], float]


def leading_findings(reference: RunView, view: RunView) -> list[Finding]:
    """The findings of all indicators on the newest steps of ``view``; empty while too few steps are common."""
    found = _loss(reference, view)
    steps = sorted(_sampled(reference) & _sampled(view))[-WINDOW:]
    if len(steps) >= FEWEST:
        ours, theirs = _gradients(view, steps), _gradients(reference, steps)
        found += growing_gradients(ours, theirs)
        found += drifting_gradients(ours, theirs)
    return found


def _sampled(view: RunView) -> set[int]:
    return {
        s.step
        for process, steps in view.timeline.items()
        for s in steps
        if s.sampled and s.complete and not s.skipped and is_well(view, process, s)
    }


# -- the loss ---------------------------------------------------------------------------------------------------------


def _losses(view: RunView) -> dict[int, float]:
    """Mean loss over ranks, by complete step; steps with a non-finite loss are left out."""
    complete = usable_steps(view)
    return {step: loss for step, loss in mean_losses(view).items() if step in complete and math.isfinite(loss)}


@dataclass(frozen=True)
class LossGap:
    """The newest losses of a run compared with those of its reference.

    Attributes:
        steps: the steps compared.
        gap: median by which the loss is above the reference's on the same step, or median of the loss above that of the
            reference's :attr:`lag` steps earlier, whichever is less.
        limit: largest gap that counts as no gap.
        lag: in steps.
    """

    steps: Sequence[int]
    gap: float
    limit: float
    lag: int


def loss_gap(ours: Mapping[int, float], theirs: Mapping[int, float]) -> LossGap | None:
    """The gap between the losses (by step) of run and reference; None while there are too few common steps.

    While a loss falls, two seeds always differ by as much as it falls in a few steps. The run is therefore compared
    with the higher of the reference's losses now and :data:`LAG` of the steps ago, and the limit depends on the noise
    of the difference. None also if the reference has too few losses so long ago.
    """
    steps = sorted(ours.keys() & theirs.keys())[-WINDOW:]
    if len(steps) < FEWEST:
        return None
    lag = max(WINDOW, math.ceil(LAG * steps[-1]))
    earlier = [theirs[s - lag] for s in steps if s - lag in theirs]
    if len(earlier) < FEWEST:
        return None
    differences = [ours[s] - theirs[s] for s in steps]
    middle = median(differences)
    noise = GAUSSIAN_MAD * median(abs(d - middle) for d in differences) / math.sqrt(len(differences))
    expected = max(median(theirs[s] for s in steps), median(earlier))
    gap = min(middle, median(ours[s] for s in steps) - expected)
    return LossGap(steps, gap, max(LOSS_GAP, SIGNIFICANT * noise), lag)


def _loss(reference: RunView, view: RunView) -> list[Finding]:
    ours, theirs = _losses(view), _losses(reference)
    found = loss_gap(ours, theirs)
    if found is None or found.gap <= found.limit:
        return []
    first, last = found.steps[0], found.steps[-1]
    message = (
        f"Over the newest {plural(len(found.steps), 'common step')} ({first} to {last}) the loss is {found.gap:.4g} "
        f"above what the reference had there and {found.lag} steps before, in the median (limit {found.limit:.2g}: "
        f"{LOSS_GAP} nats, or {SIGNIFICANT:g} standard errors of the difference if that is more); at step {last} it is "
        f"{ours[last]:.4g} against {theirs[last]:.4g}."
    )
    evidence = {"gap": found.gap, "limit": found.limit, "lag_steps": found.lag, "steps": len(found.steps)}
    place = Location(phase=Phase.LOSS, step=first)
    return [_finding("PD821", f"the loss is {found.gap:.3g} above the reference", message, place, evidence)]


# -- gradients --------------------------------------------------------------------------------------------------------


def _gradients(view: RunView, steps: Sequence[int]) -> Course:
    """The gradients as the optimizer reads them, the largest over ranks. Rows of zeros or with NaN are left out."""
    view.keep(steps)
    rows = view.measured(["multiplier"], ("weight_grad_step",), columns=("numel", "amax", "sum_sq", "nan"), steps=steps)
    rows = rows[(rows["amax"] > 0.0) & (rows["sum_sq"] > 0.0) & (rows["nan"] == 0)]
    squares = rows["sum_sq"] / rows["multiplier"] ** 2 / rows["numel"]
    rows = rows.assign(amax=rows["amax"] / rows["multiplier"], square=squares)
    named = rows.astype(dict.fromkeys(IDENTITY[:-1], str))
    return named.groupby([*IDENTITY, "step"])[["amax", "square"]].max()


def _ratios(ours: Course, theirs: Course, which: str) -> Iterator[tuple[Key, dict[int, float]]]:
    """``(key, {step: log2(ours / theirs)})`` of each gradient with at least :data:`FEWEST` steps in both runs."""
    ratios = (ours[which] / theirs[which]).dropna().map(math.log2)
    place: Any  # which pandas types as one label
    for place, course in ratios.groupby(level=list(IDENTITY)):
        if len(course) >= FEWEST:
            root, module, kind, name, call = place
            yield (
                (root, module, kind, name, int(call)),
                dict(zip(course.index.get_level_values("step"), course, strict=True)),
            )


def growing_gradients(ours: Course, theirs: Course) -> list[Finding]:
    """A finding on gradients whose amax grows faster than the reference's and has been above it in the last quarter."""
    beyond = []
    for key, binades in _ratios(ours, theirs, "amax"):
        values = list(binades.values())
        quarter = len(values) // 4
        last = median(values[-quarter:])
        growth = min(last - median(values[:quarter]), last)
        if growth >= GROWTH and all(v > 0.0 for v in values[-quarter:]):
            beyond.append((key, binades, growth))
    return _gradient_finding(
        "PD822", beyond, "amax of the gradient", GROWTH, "grew {:.1f} binades more than the reference's"
    )


def drifting_gradients(ours: Course, theirs: Course) -> list[Finding]:
    """A finding on gradients whose mean square differs from the reference's by :data:`DRIFT` binades in the median."""
    beyond = []
    for key, binades in _ratios(ours, theirs, "square"):
        level = median(binades.values())
        if abs(level) >= DRIFT:
            beyond.append((key, binades, level))
    return _gradient_finding(
        "PD823", beyond, "second moment of the gradient", DRIFT, "is {:+.1f} binades from the reference's"
    )


def _gradient_finding(code: str, moved: Sequence[_Moved], what: str, limit: float, words: str) -> list[Finding]:
    """One finding: the gradient that moved most, the others as evidence."""
    if not moved:
        return []
    ranked = sorted(moved, key=lambda m: -abs(m[2]))
    (root, module, kind, name, _), ratios, furthest = ranked[0]
    steps = sorted(ratios)
    parameter = ".".join(p for p in (module, name) if p)
    change = words.format(furthest)
    message = (
        f"Over the newest {plural(len(steps), 'common sampled step')} ({steps[0]} to {steps[-1]}) the {what} of "
        f"`{parameter}` {change} (limit {limit:g}). {plural(len(moved), 'gradient')} beyond it."
    )
    evidence = {
        "binades": furthest,
        "limit": limit,
        "ratio_binades": [[s, ratios[s]] for s in steps],
        "tensors": [
            {"root": key[0], "parameter": f"{key[1]}.{key[3]}".strip("."), "binades": binades}
            for key, _, binades in ranked[:16]
        ],
    }
    place = Location(root=root or None, module=module, kind=kind, phase=Phase.BACKWARD, step=steps[0])
    return [_finding(code, f"the {what} of `{parameter}` {change}", message, place, evidence)]


def _finding(code: str, title: str, message: str, place: Location, evidence: Mapping[str, object]) -> Finding:
    return Finding(code, CODES[code], Severity.WARNING, 0.8, title, message, place, evidence=evidence)
