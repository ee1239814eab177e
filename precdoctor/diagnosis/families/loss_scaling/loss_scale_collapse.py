"""PD301: the dynamic loss scale keeps falling.

Two parts of the rule have modules of their own: gradients that skipped steps leave behind
(:mod:`.loss_scale_collapse_leftover`) and the prescriptions (:mod:`.loss_scale_collapse_prescriptions`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from precdoctor.diagnosis.analyses.loss_scales import after_calibration, growth_interval, scaled_steps
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, mended_by_the_scale, same_module, wears_the_scale_out, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.loss_scale_collapse_leftover import find_leftover_gradients
from precdoctor.diagnosis.families.loss_scaling.loss_scale_collapse_prescriptions import (
    lower_bound,
    prescriptions,
    shorter_interval,
)
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Culprits, culprits
from precdoctor.diagnosis.families.loss_scaling.scale_level import LostGradient, higher_level, lost_gradient
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A dynamic loss scale that (a) falls below 1, (b) loses `fall_binades` within `window` steps after it found its level, or
(c) stays busy: more than `skipped_share` of the steps after calibration are skipped. A fresh scaler normally comes down
from its initial 2^16 by overflows until the first clean steps. These overflows count only (d) if the scale fell by at
least `fall_binades` to a level at which an FP16 gradient is flushed or has few bits left, by the measure of PD201 and
PD303; or (e) if every step of the run was skipped, `never_steps` at least. The rule names the layer that overflows
first from the recorded tensors of the skipped steps, forward pass first.

A script that omits `zero_grad()` together with a skipped step adds the next gradients to an Inf, and skips for ever.
The finding reports this instead if the non-finite elements of an overflow never become fewer, over `kept_steps` steps
and to the end of the run, although every gradient that arrives is finite.
""",
    matters="""
Every skipped step discards a batch. A lower scale also multiplies small gradients by less, so other layers underflow
while one overflows; below 1 the scaler *divides*. A stock scaler has no floor: it halves to 0, and then every gradient
is 0 or NaN.
""",
    example="""
A logit without `1/sqrt(d)` or an auxiliary loss multiplied by 1e4 overflows in FP16 at any scale worth having: 65536,
32768, ... 1, 0.5, while the loss curve just goes flat.
""",
    remedy="""
Run the named layer in FP32 or BF16, or fix the magnitude there; then the scale recovers by itself. If many layers
overflow together, start lower and grow more slowly. A scaler with a lower bound (`min_scale` in DeepSpeed, Megatron and
fairseq) skips for ever if gradients overflow at that bound: remove it. Zero the gradients after every step, under no
`if`. BF16 needs no scale: drop the scaler. The finding omits a change that is predicted to save less than a quarter of
the skips.
""",
    confidence="""
0.95 if the scale fell below 1 or the overflowing layer was recorded, 0.8 otherwise. If the loss is non-finite at the
same steps, PD101, PD103 or PD104 reports it and includes this finding: then the scale is a victim. It is the other way
round for a scale that fell below 1 without ever growing back, though four steps of five were clean: single bad batches
are discarded without harm, and the growth interval is what they are held against.
""",
    references=(
        "PyTorch documentation: torch.amp.GradScaler (init_scale 2**16, growth 2 every 2000, backoff 0.5, no floor)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
        "Zhang et al., OPT, arXiv:2205.01068, section 2.5 (loss scale crashing to 0)",
    ),
)

#: Maximum number of points of the scale's history in the evidence; a plot needs no more.
_MAX_POINTS = 64


@dataclass(frozen=True)
class _ScaleHistory:
    """The scaled steps of one process: all of them, and those after calibration."""

    process: Process
    steps: Sequence[StepFacts]
    after: Sequence[StepFacts]


@dataclass(frozen=True)
class _Collapse:
    """A collapse of the loss scale of one process.

    Attributes:
        first, last: the steps between which the scale fell.
        start, end: the scale before and after the fall.
        measured: the measurement and its limit, as the first words of the message.
        severe: the finding is an error, not a warning.
        lost: the gradient that the level of a fresh scaler harms; None for other collapses.
    """

    first: int
    last: int
    start: float
    end: float
    measured: str
    severe: bool
    lost: LostGradient | None = None


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the worst collapse of any process."""
    histories = [_ScaleHistory(p, steps, after_calibration(steps)) for p, steps in scaled_steps(view)]
    if not histories:
        return Checked.not_applicable(
            "no loss scale was seen: no GradScaler, and no scaling by hand that is undone before the step"
        )
    collapses = [(c, found) for c in histories if (found := _find_collapse(view, c, options)) is not None]
    seen = f"the loss scale of {plural(len(histories[0].steps), 'step')}"
    if not collapses:
        skipped = sum(s.skipped for s in histories[0].steps)
        low = min(s.loss_scale or 0.0 for s in histories[0].steps)
        return Checked((), f"{seen}: lowest {low:g}, {plural(skipped, 'skipped step')}")
    history, collapse = max(collapses, key=lambda c: (c[1].severe, -c[1].end, -c[0].process.rank))
    return Checked([_finding(view, history, collapse, options)], f"{collapse.measured} in {seen}")


def _find_collapse(view: RunView, history: _ScaleHistory, options: Options) -> _Collapse | None:
    """The first kind of collapse that applies; None if none does."""
    scales = [s.loss_scale or 0.0 for s in history.steps]
    low = next((i for i, x in enumerate(scales) if x < options["floor"]), None)
    if low:  # not 0: a scale below 1 from the first step on is the user's choice
        begin, end = max(range(low), key=lambda i: (scales[i], i)), min(scales[low:])
        words = f"the loss scale fell from {scales[begin]:g} to {end:g} (limit {options['floor']:g}),"
        return _Collapse(history.steps[begin].step, history.steps[-1].step, scales[begin], end, words, severe=True)
    return (
        _never_stepped(history, options)
        or _deepest_fall(history, options)
        or _frequent_skips(view, history, options)
        or _calibration_collapse(view, history, options)
    )


def _never_stepped(history: _ScaleHistory, options: Options) -> _Collapse | None:
    """The collapse of a scaler that skipped every step of the run; else None."""
    if history.after or len(history.steps) < options["never_steps"]:
        return None
    first, last = history.steps[0], history.steps[-1]
    start, end = first.loss_scale or 0.0, last.loss_scale or 0.0
    words = f"no weight has moved: all {plural(len(history.steps), 'step')} were skipped (limit "
    words += f"{options['never_steps']:g}), at loss scales from {start:g} to {end:g},"
    return _Collapse(first.step, last.step, start, end, words, severe=True)


def _calibration_collapse(view: RunView, history: _ScaleHistory, options: Options) -> _Collapse | None:
    """The collapse of a fresh scaler whose calibration ended at a level that harms gradients; else None."""
    calibrating = history.steps[: len(history.steps) - len(history.after)]
    if not calibrating or not history.after:
        return None
    start, level = (part[0].loss_scale or 0.0 for part in (calibrating, history.after))
    binades = math.log2(start / level) if start > 0.0 and level > 0.0 else 0.0
    lost = lost_gradient(view) if binades >= options["fall_binades"] else None
    if lost is None:
        return None
    words = f"a fresh loss scale fell {binades:.0f} binades (limit {options['fall_binades']:g}), from {start:g} to "
    words += f"{level:g}, where {lost.words},"
    return _Collapse(calibrating[0].step, calibrating[-1].step, start, level, words, severe=False, lost=lost)


def _deepest_fall(history: _ScaleHistory, options: Options) -> _Collapse | None:
    """The fall within the window, after calibration, that ends at the lowest scale; None if none reaches the limit."""
    after, worst = history.after, None
    window, limit = int(options["window"]), options["fall_binades"]
    high = 0
    for i, facts in enumerate(after):
        scale = facts.loss_scale or 0.0
        while after[high].step < facts.step - window:
            high += 1
        top = max(range(high, i + 1), key=lambda j: (after[j].loss_scale or 0.0, j))
        peak = after[top].loss_scale or 0.0
        binades = math.log2(peak / scale) if scale > 0.0 else 0.0
        if binades >= limit and (worst is None or scale < worst.end):
            words = f"the loss scale fell {binades:.0f} binades (limit {limit:g}), from {peak:g} to {scale:g},"
            words += f" within {plural(facts.step - after[top].step, 'step')},"
            worst = _Collapse(after[top].step, facts.step, peak, scale, words, severe=False)
    return worst


def _frequent_skips(view: RunView, history: _ScaleHistory, options: Options) -> _Collapse | None:
    """The collapse of a scaler that skips more often after calibration than probes explain; else None."""
    after = history.after
    if len(after) < options["busy_steps"]:
        return None
    limit = max(options["skipped_share"], 3.0 / (1.0 + (growth_interval(view, history.process) or math.inf)))
    share = sum(s.skipped for s in after) / len(after)
    if share < limit:
        return None
    words = f"{percent(share)} of the steps after calibration were skipped (limit {percent(limit)}),"
    scales = [s.loss_scale or 0.0 for s in after]
    return _Collapse(after[0].step, after[-1].step, max(scales), min(scales), words, severe=False)


def _finding(view: RunView, history: _ScaleHistory, collapse: _Collapse, options: Options) -> Finding:
    steps = [s for s in history.steps if s.skipped and collapse.first <= s.step <= collapse.last]
    skipped = [s.step for s in steps]
    leftover = find_leftover_gradients(view, history.process, history.steps, options["kept_steps"])
    found = culprits(view, history.process, [s for s in steps if leftover is None or s.step <= leftover.first])
    layer_known = found.most_frequent is not None
    message = f"On rank {history.process.rank}, {collapse.measured} at steps {collapse.first} to {collapse.last}: "
    message += f"{plural(len(skipped), 'step')} skipped. {found.words(view)}"
    if leftover is not None:
        message += f" {leftover.words}"
    bound = lower_bound(history.steps, options["held_skips"])
    if bound is not None and leftover is None:
        held_skips = sum((s.loss_scale or 0.0) <= bound for s in steps)
        message += f" {plural(held_skips, 'skip')} at {bound:g} did not lower the scale: the scaler may not go lower."
    evidence = _evidence(history, collapse, found, skipped)
    clean = _clean_between_skips(history) if collapse.severe and leftover is None else None
    if clean is not None:
        evidence["clean_between_skips"] = clean
        message += f" It never grew back: {plural(clean, 'clean step')} lie between two overflows (median)"
        interval = growth_interval(view, history.process)
        message += f", and the growth interval is {interval:,.0f}." if interval else "."
    evidence |= {"lower_bound": bound, "gradients_kept_since": leftover.first if leftover is not None else None}
    if collapse.lost is not None:
        evidence["flushed_at_level"] = collapse.lost.series.share
    because = f" because of {found.name(view)}" if layer_known else ""
    if leftover is not None:
        because = ": gradients of skipped steps are never zeroed"
    return RULE.finding(
        severity=Severity.ERROR if collapse.severe else Severity.WARNING,
        confidence=0.95 if collapse.severe or layer_known else 0.8,
        title=f"{collapse.measured.rstrip(',')}{because}",
        message=message,
        location=found.location(history.process, collapse.first),
        evidence=evidence,
        prescriptions=shorter_interval(view, history.process, clean, collapse.start, collapse.end)
        + _prescriptions(view, history, collapse, found, bound)
        if leftover is None
        else (leftover.prescription(sum(s.skipped for s in history.steps)),),
    )


def _clean_between_skips(history: _ScaleHistory) -> int | None:
    """Median number of clean steps between the overflows that wore the scale down.

    None if the scale ever grew, if fewer than two steps or more than a fifth were skipped, or if the median is 0.
    """
    after, clean = history.after, [0]
    for facts, following in pairwise(after):
        if (following.loss_scale or 0.0) > (facts.loss_scale or 0.0):
            return None
        clean[-1] += not facts.skipped
        clean += [0] * facts.skipped
    skipped = sum(s.skipped for s in after)
    return int(median(clean)) if skipped > 1 and len(after) >= 5 * skipped and median(clean) >= 1 else None


def _prescriptions(
    view: RunView, history: _ScaleHistory, collapse: _Collapse, found: Culprits, bound: float | None
) -> tuple[Prescription, ...]:
    if collapse.lost is not None:
        return higher_level(view, collapse.lost, found.most_frequent, collapse.end)
    return prescriptions(view, history.steps, collapse.start, collapse.end, found, bound)


def _evidence(
    history: _ScaleHistory, collapse: _Collapse, found: Culprits, skipped: Sequence[int]
) -> dict[str, object]:
    layer = found.most_frequent
    evidence: dict[str, object] = {
        "first_overflow_step": skipped[0] if skipped else collapse.first,
        "last_bad_step": collapse.last,
        "scale": {"from": collapse.start, "to": collapse.end},
        "skipped_steps": len(skipped),
        "culprits": found.as_evidence(),
        "loss_scale_history": [[s.step, s.loss_scale] for s in _thinned(history.steps)],
        "last_finite_step": None,
        "confidence_reason": "the overflowing layer was recorded" if layer is not None else "no overflow was sampled",
    }
    return evidence if layer is None else evidence | layer.as_evidence()


def _thinned(steps: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """The steps on which the scale changed, the first and the last; at most ``_MAX_POINTS``, the last among them."""
    changes = [s for i, s in enumerate(steps) if i in (0, len(steps) - 1) or s.loss_scale != steps[i - 1].loss_scale]
    return changes[:: -max(1, math.ceil(len(changes) / _MAX_POINTS))][::-1]


def flushed_at_its_level(cause: Finding, _effect: Finding) -> bool:
    """Whether the collapse (``cause``) left the scale at a level at which gradients are flushed."""
    return "flushed_at_level" in cause.evidence


RULE = Rule(
    code="PD301",
    name="loss-scale-collapse",
    severity=Severity.ERROR,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        RuleOption("floor", 1.0, "loss scale", "Below this the scaler divides.", "By definition of scaling up."),
        RuleOption("fall_binades", 5.0, "binades", "Minimum fall within the window; each backoff is one binade.",
                   "Chosen empirically: a bad batch costs one, a growth probe one; five in a row is a change of phase.",
                   1.0),
        RuleOption("window", 100.0, "steps", "Steps over which the fall is measured.", minimum=1.0),
        fraction("skipped_share", 0.1, "Maximum share of skipped steps after calibration.",
                 "A stock scaler skips one step in 2000; shorter growth intervals may skip three per interval."),
        RuleOption("busy_steps", 40.0, "steps", "Minimum number of steps after calibration for that share.",
                   minimum=1.0),
        RuleOption("never_steps", 12.0, "steps", "Minimum length of a run in which every step was skipped.",
                   "A stock scaler that starts at 2^16 is at 2^4 by then. Chosen empirically.", 2.0),
        RuleOption("held_skips", 3.0, "steps", "Minimum number of skips at the lowest scale that prove a lower bound.",
                   "Chosen empirically: without one, every skip lowers the scale.", 1.0),
        RuleOption("kept_steps", 6.0, "steps", "Minimum number of skips that prove leftover gradients.",
                   "Chosen empirically: each halves the scale, and a real overflow has other elements each time.", 2.0),
    ),
    sampled_steps=False,
    explains={
        **when(anywhere, "PD302", "PD303"),
        **when(same_module, "PD601", "PD602"),
        **when(mended_by_the_scale, "PD102"),
        **when(wears_the_scale_out, "PD101", "PD103"),
        **when(flushed_at_its_level, "PD201", "PD202"),
    },
    check=check,
)  # fmt: skip
