"""PD406: the amax of an FP8 operand runs away from its bulk, with a forecast of when the bulk is flushed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.trends import Forecast, Trend, fit
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Casts, Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    FLUSHED_SHARE,
    MIN_ELEMENTS,
    in_blocks_apart,
    in_e5m2,
    kept_wide,
    listed,
    seen_words,
)
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import E4M3FN, E5M2, Format

PAGE = RulePage(
    finds="""
Operands of FP8 casts whose unscaled amax grows exponentially while their bulk stays behind. Amax must grow by
`min_growth` binades over the newer half of the recorded steps, on a line through log2(amax) with a slope above zero
(95 % certainty) that is at least half that of the whole run, and without a single jump that two constants fit better. A
scale that follows amax takes the format along, so the distance between amax and the magnitude below which the allowed
share of the elements lies must also grow. Its line must reach the range of the format (18.8 binades in E4M3, 32.8 in
E5M2, from the largest number down to the flush limit) within `horizon` times the recorded steps. PD402, PD403 and PD408
report operands that are already above the limit, PD602 growth towards the limit of a 16-bit format, PD603 gradients
that grow with the loss.
""",
    matters="""
Outliers that amplify themselves (gated products, attention logits, an output layer without weight decay) have ended
FP8 trainings after weeks that went well: per-tensor scales follow the outliers, and everything else sinks.
""",
    example="""
A gated MLP: one channel of `up(x) * gate(x)` doubles every 50 steps, the rest stays. 14 binades at step 0 of 18.8; at
step 240 the rest is below what E4M3 holds.
""",
    remedy="""
Stop the growth at its source: weight decay or a norm on the named layer, a lower learning rate. Meanwhile scale per
block, so that only the outlier's own block sinks, or keep the operand wide.
""",
    confidence="""
0.8; 0.65 with fewer than 24 fitted steps or a forecast whose interval spans more than a factor of four.
""",
    references=(
        "Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv:2409.12517 (outliers of gated products)",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
    ),
)


#: Largest share of blocks with an outlier for blocks to help: the default of PD408's `hot_blocks`.
_MOST_HOT = 0.5


@dataclass(frozen=True, eq=False)
class _Growing:
    """An operand whose amax grows and leaves its bulk behind."""

    operand: Operand
    amax: Trend
    #: Trend of the distance between amax and the lower end of the bulk.
    spread: Trend
    #: Steps until that distance is the format's range.
    left: Forecast


def check(view: RunView, options: Options) -> Checked:
    """One finding: the operand whose bulk is flushed first."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    judged = [o for o in found.values() if o.numel >= options["min_elements"]]
    longest = max((len(o.scaled) for o in judged), default=0)
    if longest < 2 * options["min_points"]:
        return Checked.not_applicable(f"{seen_words(found)}: too few steps of known scale for a trend")
    trends = [(o, trend) for o in judged if (trend := _amax_trend(o, options)) is not None]
    growing = [g for o, trend in trends if (g := _with_forecast(o, trend, options)) is not None]
    if not trends:
        return Checked((), f"{seen_words(found)}: amax of none grows by {options['min_growth']:g} binades")
    if not growing:
        return Checked((), f"{seen_words(found)}: amax of {len(trends):,} grows, and the bulk with it")
    growing.sort(key=lambda g: (g.left.estimate, -g.amax.climbed, g.operand.key))
    return Checked([_finding(view, growing, options)], f"{len(growing)} of {seen_words(found)} grow")


def reach(fmt: Format) -> float:
    """Binades from the largest number of a format down to its flush limit."""
    return math.log2(fmt.max) - math.log2(fmt.flush_limit)


def _nonzero_casts(operand: Operand) -> Casts:
    """Return the settled casts of known scale that are not all zeros."""
    return operand.scaled[operand.scaled.amax > 0.0]


def _amax_trend(operand: Operand, options: Options) -> Trend | None:
    """Return the trend of amax; None unless it grows by `min_growth` binades while the cast flushes little."""
    casts = _nonzero_casts(operand)
    if len(casts) < 2 * options["min_points"] or operand.flushed_share >= options["flushed_share"]:
        return None
    amax = fit(list(zip(casts.step.tolist(), casts.amax.tolist(), strict=True)))
    return amax if amax is not None and amax.rises and amax.climbed >= options["min_growth"] else None


def _with_forecast(operand: Operand, amax: Trend, options: Options) -> _Growing | None:
    """Return the operand with its forecast; None if the bulk grows with amax or the forecast exceeds `horizon`."""
    casts = _nonzero_casts(operand)
    floors = casts.histograms.taken(casts.row).positions(options["flushed_share"])
    spreads = np.exp2(np.log2(casts.peak) - floors)
    spread = fit(list(zip(casts.step.tolist(), spreads.tolist(), strict=True)))
    if spread is None or not spread.rises:
        return None
    left = spread.steps_to(2.0 ** reach(operand.fmt))
    recorded = int(casts.step[-1] - casts.step[0])
    return _Growing(operand, amax, spread, left) if left.estimate <= options["horizon"] * recorded else None


def _finding(view: RunView, growing: Sequence[_Growing], options: Options) -> Finding:
    worst = growing[0]
    operand, trend, left = worst.operand, worst.amax, worst.left
    casts = _nonzero_casts(operand)
    cast, first = casts[-1], casts[0]
    steps = plural(trend.last - trend.first, "step")
    return RULE.finding(
        confidence=0.65 if left.is_wide or trend.is_short else 0.8,
        title=f"amax of the {operand.label} grows {100.0 * trend.slope:.2g} binades per 100 steps: its bulk is flushed "
        f"in about {left.estimate:,.0f} steps",
        message=f"Amax of the {operand.label} ({operand.fmt.dtype}) grows by a factor of "
        f"{2.0 ** (100.0 * trend.slope):.3g} per 100 steps: {first.amax or 0.0:.3g} at step {first.step}, "
        f"{cast.amax or 0.0:.3g} at step {cast.step}, {trend.climbed:.1f} binades over the newest {steps} (limit "
        f"{options['min_growth']:g}). Its bulk stays behind: the distance from amax down to the smallest "
        f"{percent(options['flushed_share'])} is {worst.spread.level:.1f} of the format's {reach(operand.fmt):.1f} "
        f"binades and full in {left.estimate:,.0f} steps (95 %: {left.interval_words}). Affected: "
        f"{plural(len(growing), 'operand')}.",
        location=operand.location(cast),
        evidence={
            "binades_per_100_steps": 100.0 * trend.slope,
            "slope_interval": [100.0 * trend.low, 100.0 * trend.high],
            "climbed_binades": trend.climbed,
            "limit": options["min_growth"],
            "steps_to_flush": left.estimate,
            "steps_to_flush_interval": [left.low, left.high],
            "range_binades": reach(operand.fmt),
            "points_fitted": trend.points,
            "history": operand.history(casts),
            "tensors": listed((g.operand for g in growing), "amax"),
            **operand.evidence(view, cast),
            "confidence_reason": left.reason,
        },
        prescription=_prescribe(view, worst),
    )


def _prescribe(view: RunView, growing: _Growing) -> Prescription:
    """Prescribe E5M2 for a gradient in E4M3, else blocks, else no cast; predict the steps or the blocks it saves."""
    operand, soon = growing.operand, growing.left.estimate
    predicted: dict[str, dict[str, float]]
    if operand.gradient and operand.fmt.mantissa_bits == E4M3FN.mantissa_bits:
        cure, later = in_e5m2(operand), growing.spread.steps_to(2.0 ** reach(E5M2)).estimate
        words = f"steps until the bulk is flushed {soon:,.0f} -> {later:,.0f}"
        predicted = {"steps_to_flush": {"from": round(soon), "to": round(later)}}
    else:
        cure, hot = in_blocks_apart(view, operand, _MOST_HOT) or (kept_wide(operand), 0.0)
        words = f"share of its blocks that sinks with the amax {percent(1.0)} -> {percent(hot)}"
        predicted = {"sinking_share": {"from": 1.0, "to": hot}}
    return cure.prescription(words, predicted)


RULE = Rule(
    code="PD406",
    name="fp8-amax-explosion",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("min_growth", 3.0, "binades", "Least growth of the line over the newer half of the steps.",
                   "Chosen empirically: amax of healthy tensors stays within a factor of eight after the first steps."),
        RuleOption("min_points", 8.0, "steps", "Least number of recorded steps in the newer half.",
                   "A line and its error need a few points.", 4.0),
        RuleOption("horizon", 4.0, "times the run", "Longest forecast.",
                   "As in PD602: growth early in training levels off."),
        FLUSHED_SHARE,
        MIN_ELEMENTS,
    ),
    check=check,
)  # fmt: skip
