"""PD502: weights trained in 16 bits without a wider copy, and what that costs at the end of the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.advice.wide_weights import fp32_weights, wide_weights, widened_bytes
from precdoctor.diagnosis.analyses.parameters import stepped_in_half
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import memory, percent, plural
from precdoctor.diagnosis.families.updates.lost_weight_updates_counts import lost_and_intended
from precdoctor.diagnosis.survey.frames import at, histograms
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.histogram import ExponentHistogram

PAGE = RulePage(
    finds="""
Weights in BF16 or FP16 that an optimizer with a known learning rate updates in place, with no wider copy. Their
updates still stick but will not once the learning rate has come down: the recorded histogram of exponent(dw) -
exponent(w), shifted by the factor `decay` (schedules commonly end at a tenth), gives the share below half an ulp of
the weight's format. The finding is a warning when more than `lost_now` is lost already. Beyond PD501's limit that rule
takes over.
""",
    matters="""
Training looks healthy at the peak learning rate and stops of its own accord as the schedule decays, which looks like
convergence.
""",
    example="""
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)   # sticks
    # cosine schedule to 2e-3: half of the updates are lost
""",
    remedy="""
Keep FP32 weights and compute in BF16 under autocast, or use an optimizer with FP32 master weights, stochastic rounding
or Kahan summation. The finding states the memory it costs.
""",
    confidence="""
0.8: the histogram is exact, but that the learning rate will fall is an assumption. 0.65 below four recorded steps.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192",
    ),
)
_COLUMNS = ("unchanged", "rel_lo", "rel_hist")
#: FP32 has 24 significant bits. An update this many binades below its weight is negligible: FP32 would lose it as well.
_FP32_BINADES = 24


@dataclass(frozen=True)
class _Updates:
    """Sums over all updates of weights in one dtype; ``relative``: histogram of exponent(dw) - exponent(w)."""

    relative: ExponentHistogram
    lost: float
    intended: float
    steps: int
    #: Largest learning rate of the recorded steps; 0.0 if it is not known.
    rate: float


def check(view: RunView, options: Options) -> Checked:
    """One finding for the narrow dtype with most weight elements."""
    dtype, weights = stepped_in_half(view)
    if not weights:
        return Checked.not_applicable("no weight that an optimizer changes is in BF16 or FP16")
    if any(text(o.get("intended_update")) == "gradient" for o in view.optimizers):
        return Checked.not_applicable("the optimizer's intended updates are not known")
    if not any(s.lr for steps in view.timeline.values() for s in steps):
        return Checked.not_applicable("no learning rate is known, so nothing says that it will fall")
    updates = _survey(view, dtype)
    seen = f"the updates of {plural(len(weights), 'weight')} in {dtype}"
    if not updates.intended:
        return Checked.indeterminate(f"{plural(len(weights), 'weight')} in {dtype}, but no update was recorded")
    now = updates.lost / updates.intended
    later = max(now, _lost(updates, dtype, options["decay"]))
    if later < options["lost_later"]:
        return Checked((), f"{seen}: {percent(later)} would be lost at {options['decay']:g} of the rate")
    finding = _finding(view, dtype, weights, updates, (now, later), options)
    return Checked([finding], f"{percent(later)} of {seen} lost at {options['decay']:g} of the rate")


def _survey(view: RunView, dtype: str) -> _Updates:
    """Sum all recorded updates of weights in ``dtype``, without those that FP32 would lose as well."""
    frame = view.measured(("intended",), ("update",), columns=_COLUMNS, where=[("dtype", "==", dtype)])
    frame = frame[frame["unchanged"].notna()]
    relative = histograms(frame, "rel")
    lost, intended = lost_and_intended(frame, relative, _FP32_BINADES).sum(axis=0).tolist()
    steps = (view.step_facts(process, step) for process, step in set(at(frame)))
    rate = max((s.lr for s in steps if s is not None and s.lr), default=0.0)
    whole = relative.merged(np.zeros(len(frame), np.int64), 1).row(0)
    return _Updates(whole[-_FP32_BINADES:], lost, intended, frame["step"].nunique(), rate)


def _lost(updates: _Updates, dtype: str, factor: float) -> float:
    """Share of the updates below half an ulp if all were multiplied by ``factor``.

    The bin in which half an ulp lies counts in proportion.
    """
    fmt = known_format(dtype)
    if fmt is None or not updates.relative.total:
        return 0.0
    edge = -(fmt.mantissa_bits + 1) - math.log2(factor)  # bins below this one are lost
    whole = math.floor(edge)
    below = updates.relative[:whole].total + (edge - whole) * updates.relative[whole : whole + 1].total
    return below / updates.relative.total


def _finding(
    view: RunView, dtype: str, weights: dict[str, int], updates: _Updates, lost: tuple[float, float], options: Options
) -> Finding:
    now, later = lost
    elements = sum(weights.values())
    extra = widened_bytes(view, elements)
    few = updates.steps < 4
    return RULE.finding(
        severity=Severity.WARNING if now >= options["lost_now"] else Severity.INFO,
        confidence=0.65 if few else 0.8,
        title=f"{dtype} weights without a wider copy: {percent(later)} of updates lost once the rate has decayed",
        message=f"{plural(len(weights), 'weight')} ({elements:,} elements) are {dtype} with no wider copy. At the "
        f"recorded rate, {updates.rate:.3g}, {percent(now)} of the updates were lost, over "
        f"{plural(updates.steps, 'step')}; at {options['decay']:g} of it {percent(later)} would be (limit "
        f"{percent(options['lost_later'])}).",
        location=Location(root=next(iter(weights)).split(".", 1)[0], phase=Phase.OPTIMIZER, kind="update"),
        evidence={
            "lost_share": now,
            "lost_share_after_decay": later,
            "limit": options["lost_later"],
            "decay": options["decay"],
            "weights": len(weights),
            "elements": elements,
            "relative_update": {"exp_lo": updates.relative.lo, "exp_hist": updates.relative.counts.tolist()},
            "confidence_reason": "fewer than four steps were recorded"
            if few
            else "updates are exact, the decay assumed",
        },
        prescription=Prescription(
            title=f"{fp32_weights(view, (dtype,))}, BF16 autocast: lost at the end {percent(later)} -> "
            f"0 %, +{memory(extra)}",
            change={"weight_dtype": {"from": dtype, "to": "float32"}},
            predicted={"lost_share": {"from": later, "to": 0.0}, "extra_bytes": extra},
            snippet=wide_weights(view, (dtype,)),
        ),
    )


RULE = Rule(
    code="PD502",
    name="no-master-weights",
    severity=Severity.INFO,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("decay", 0.1, "Factor by which the learning rate is expected to come down.",
                 "Cosine and linear schedules commonly end at a tenth or below (arXiv:2203.15556).", 2.0**-20),
        fraction("lost_later", 0.25, "Least share of lost updates at that rate.", "As PD501."),
        fraction("lost_now", 0.1, "Share of lost updates today from which the finding is a warning."),
    ),
    check=check,
)  # fmt: skip
