"""PD302: the loss scale grows back into overflow, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.loss_scales import (
    after_calibration,
    growth_interval,
    is_dynamic,
    probes,
    scaled_steps,
)
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import culprits
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.loss_scaling import STOCK_INTERVAL, ScalerPolicy, levels

PAGE = RulePage(
    finds="""
A dynamic loss scale with a growth interval so short that the scaler keeps finding the same ceiling: it doubles,
overflows, halves, and doubles again. The rule counts skipped steps at a scale that the scaler had just grown to from a
clean level. A bad batch (a skip at a scale that had not grown) and the overflows of a fresh scaler do not count.
""",
    matters="""
Every probe discards a batch and leaves the scale where it was. With the stock interval of 2000 clean steps probes cost
0.05 % of the batches; with an interval of 8 they cost one in nine, and the optimizer's moments miss them all. A few per
cent cost only time: the run ends at the same loss a little later.
""",
    example="""
    scaler = torch.amp.GradScaler("cuda", growth_interval=8)  # one step in nine is thrown away
    scaler = torch.amp.GradScaler("cuda")                     # one in 2001
""",
    remedy="""
Lengthen the growth interval to the stock 2000 steps and start at the level the run settled on. The finding replays the
run's own ceiling with that interval. If one layer sets the ceiling, running that layer in FP32 raises it for all.
""",
    confidence="""
0.95: scale and skips are recorded exactly, on every step. 0.85 if the log shows fewer than five probes.
""",
    references=(
        "PyTorch documentation: torch.amp.GradScaler (growth_interval 2000)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
    ),
)


@dataclass(frozen=True)
class _Thrash:
    """The steps of one process after calibration, and those of them that were skipped as probes."""

    process: Process
    steps: Sequence[StepFacts]
    probes: Sequence[StepFacts]
    interval: float | None

    @property
    def share(self) -> float:
        """Share of the steps that were lost to probes."""
        return len(self.probes) / len(self.steps)

    @property
    def ceiling(self) -> float:
        """The lowest scale that a probe overflowed at."""
        return min(s.loss_scale or 0.0 for s in self.probes)


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the process that loses the largest share of its steps to probes."""
    courses = [
        _Thrash(p, after, probes(after), growth_interval(view, p))
        for p, steps in scaled_steps(view)
        if is_dynamic(steps) and (after := after_calibration(steps))
    ]
    if not courses:
        return Checked.not_applicable("no dynamic loss scaler was seen")
    worst = max(courses, key=lambda c: (c.share, -c.process.rank))
    seen = f"{plural(len(worst.probes), 'probe')} into overflow in {plural(len(worst.steps), 'scaled step')}"
    if len(worst.probes) < options["min_probes"] or worst.share < options["wasted_share"]:
        return Checked((), f"{seen} (limit {percent(options['wasted_share'])})")
    return Checked([_finding(view, worst, options)], seen)


def _finding(view: RunView, thrash: _Thrash, options: Options) -> Finding:
    found = culprits(view, thrash.process, thrash.probes)
    harmful = thrash.share >= options["harmful_share"]
    limit = options["harmful_share" if harmful else "wasted_share"]
    level, steps = thrash.ceiling / 2.0, len(thrash.steps)
    stock = ScalerPolicy(init=level)
    predicted = sum(skipped for *_, skipped in levels(stock, np.full(steps, thrash.ceiling), stock.start()))
    interval = f"a growth interval of {thrash.interval:g}" if thrash.interval else "its growth interval"
    message = (
        f"{plural(len(thrash.probes), 'step')} of {steps:,} ({percent(thrash.share)}, limit "
        f"{percent(limit)}) were skipped because the scaler had just doubled its scale to {thrash.ceiling:g} or more, "
        f"which overflows. {level:g} had been clean, so {interval} is too short. "
        + ("" if harmful else "These batches are lost; the training is not harmed otherwise. ")
        + found.words(view)
    )
    evidence = {
        "wasted_share": thrash.share,
        "limit": limit,
        "probes": [s.step for s in thrash.probes[:16]],
        "growth_interval": thrash.interval,
        "ceiling": thrash.ceiling,
        "culprits": found.as_evidence(),
        "last_bad_step": thrash.probes[-1].step,
        "confidence_reason": "scale and skips are recorded on every step",
    }
    if found.most_frequent is not None:
        evidence |= found.most_frequent.as_evidence()
    return RULE.finding(
        severity=Severity.WARNING if harmful else Severity.INFO,
        confidence=0.95 if len(thrash.probes) >= 5 else 0.85,
        title=f"the loss scaler loses {percent(thrash.share)} of the steps probing {thrash.ceiling:g}",
        message=message,
        location=found.location(thrash.process, thrash.probes[0].step),
        evidence=evidence,
        prescription=_prescribe(view, thrash, level, predicted),
    )


def _prescribe(view: RunView, thrash: _Thrash, level: float, predicted: int) -> Prescription:
    before = len(thrash.probes)
    return Prescription(
        title=f"growth_interval={STOCK_INTERVAL}, starting at {level:g}: skipped steps {before} -> {predicted}",
        change={"growth_interval": {"from": thrash.interval, "to": STOCK_INTERVAL}, "init_scale": level},
        predicted={"skipped_steps": {"from": before, "to": predicted}},
        snippet=snippets.grad_scaler(view.device, level, STOCK_INTERVAL),
    )


RULE = Rule(
    code="PD302",
    name="loss-scale-thrash",
    severity=Severity.WARNING,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        fraction("wasted_share", 0.04, "Minimum share of the steps after calibration lost to probes.",
                 "Chosen empirically: 80 times what the stock interval costs; reached by intervals below 25."),
        fraction("harmful_share", 0.1, "Share from which the finding is a warning, not information.",
                 "Chosen empirically: reached by intervals up to 9; a GPT-2 without 6 % of its steps ends alike."),
        RuleOption("min_probes", 3.0, "steps", "Minimum number of probes.", minimum=1.0),
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
