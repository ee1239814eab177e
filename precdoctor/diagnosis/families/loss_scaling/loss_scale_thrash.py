"""PD302: the loss scale grows back into overflow, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import culprits
from precdoctor.diagnosis.survey.loss_scales import (
    STOCK_INTERVAL,
    after_calibration,
    growth_interval,
    is_dynamic,
    probes,
    scaled_steps,
)
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A dynamic loss scale whose growth interval is so short that the scaler spends its time finding the same ceiling: it
doubles, overflows, halves, and doubles again. Counted are skipped steps whose scale had just been grown to from a level
that was clean. A bad batch (a skip at a scale that was not grown) and the overflows of a fresh scaler do not count.
""",
    matters="""
Every probe throws a batch away, and the scale is back where it was. With the stock interval of 2000 clean steps that
costs 0.05 % of the batches; with an interval of 8 it costs one in nine, and the optimizer's moments miss them all. A
few per cent cost time and nothing else: the run ends at the same loss a little later.
""",
    example="""
    scaler = torch.amp.GradScaler("cuda", growth_interval=8)  # one step in nine is thrown away
    scaler = torch.amp.GradScaler("cuda")                     # one in 2001
""",
    remedy="""
Lengthen the growth interval to the stock 2000 steps and start at the level the run settled on. The finding replays the
run's own ceiling with that interval. If the ceiling is set by one layer, running that layer in FP32 raises it for all.
""",
    confidence="""
0.95: scale and skips are recorded exactly, on every step. 0.85 when fewer than five probes were seen.
""",
    references=(
        "PyTorch documentation: torch.amp.GradScaler (growth_interval 2000)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
    ),
)


@dataclass(frozen=True)
class _Thrash:
    process: Process
    steps: Sequence[StepFacts]
    probes: Sequence[StepFacts]
    interval: float | None

    @property
    def share(self) -> float:
        return len(self.probes) / len(self.steps)

    @property
    def ceiling(self) -> float:
        """The lowest scale that a probe overflowed at."""
        return min(s.loss_scale or 0.0 for s in self.probes)


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the process that wastes most."""
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
    return Checked([_finding(view, worst, options)], seen, Status.FAILED)


def replayed_skips(steps: int, level: float, ceiling: float, interval: int) -> int:
    """Skips of a scaler that starts at ``level``, when every scale from ``ceiling`` on overflows."""
    scale, clean, skips = level, 0, 0
    for _ in range(steps):
        if scale >= ceiling:
            scale, clean, skips = scale / 2.0, 0, skips + 1
            continue
        clean += 1
        if clean == interval:
            scale, clean = scale * 2.0, 0
    return skips


def _finding(view: RunView, thrash: _Thrash, options: Options) -> Finding:
    found = culprits(view, thrash.process, thrash.probes)
    harmful = thrash.share >= options["harmful_share"]
    limit = options["harmful_share" if harmful else "wasted_share"]
    level, steps = thrash.ceiling / 2.0, len(thrash.steps)
    after = replayed_skips(steps, level, thrash.ceiling, STOCK_INTERVAL)
    interval = f"a growth interval of {thrash.interval:g}" if thrash.interval else "its growth interval"
    message = (
        f"{plural(len(thrash.probes), 'step')} of {steps:,} ({percent(thrash.share)}, limit "
        f"{percent(limit)}) were skipped only because the scaler had just doubled its scale to "
        f"{thrash.ceiling:g} or more, which overflows, after {level:g} had been clean: {interval} is too short. "
        + ("" if harmful else "These batches are thrown away; the training is not harmed otherwise. ")
        + found.words(view)
    )
    shown = found.shown
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
    if shown is not None:
        evidence |= shown.as_evidence()
    return Finding(
        code="PD302",
        name="loss-scale-thrash",
        severity=Severity.WARNING if harmful else Severity.INFO,
        confidence=0.95 if len(thrash.probes) >= 5 else 0.85,
        title=f"the loss scaler throws away {percent(thrash.share)} of the steps probing {thrash.ceiling:g}",
        message=message,
        location=Location(
            root=shown.root if shown is not None else None,
            module=shown.module if shown is not None else None,
            module_class=(shown.module_class or None) if shown is not None else None,
            kind=shown.row.kind if shown is not None else None,
            phase=shown.phase if shown is not None else Phase.BACKWARD,
            rank=thrash.process.rank,
            step=thrash.probes[0].step,
        ),
        evidence=evidence,
        prescriptions=(_prescribe(view, thrash, level, after),),
    )


def _prescribe(view: RunView, thrash: _Thrash, level: float, after: int) -> Prescription:
    skips = {"from": len(thrash.probes), "to": after}
    return Prescription(
        title=f"growth_interval={STOCK_INTERVAL}, starting at {level:g}: skipped steps {skips['from']} -> {after}",
        change={"growth_interval": {"from": thrash.interval, "to": STOCK_INTERVAL}, "init_scale": level},
        predicted={"skipped_steps": skips},
        snippet=snippets.grad_scaler(view.device, level, STOCK_INTERVAL),
    )


RULE = Rule(
    code="PD302",
    name="loss-scale-thrash",
    severity=Severity.WARNING,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        RuleOption(
            "wasted_share",
            0.04,
            "fraction",
            "Steps after calibration lost to probes from which on it is told, as information.",
            "Precdoctor's own: 80 times what the stock interval costs; reached by intervals below 25.",
            maximum=1.0,
        ),
        RuleOption(
            "harmful_share",
            0.1,
            "fraction",
            "From this share on it is a warning.",
            "Precdoctor's own: one batch in ten, at intervals of 9 and less. A GPT-2 less 6 % ends at the same loss.",
            maximum=1.0,
        ),
        RuleOption("min_probes", 3.0, "steps", "Probes before it is a habit.", "Precdoctor's own.", 1.0),
    ),
    sampled_steps=False,
    explains=when(anywhere, "PD709"),
    check=check,
    step_columns=("loss_scale", "skipped", "growth_tracker"),
)
