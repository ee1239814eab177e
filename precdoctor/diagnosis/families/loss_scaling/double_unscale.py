"""PD309: gradients are divided by the loss scale twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling import loss_not_scaled, unscaled_twice
from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Gradients that reach the optimizer smaller by the loss scale than they should be. Both are recorded: what the backward
pass left, still multiplied by the scale S, and what the optimizer is given. Their ratio is 1/S, times one factor common
to all weights where the norm is clipped. It is told where that factor is 1/S once more, to within `tolerance` binades,
in the median of the weights, on `share` of the steps and more. Scales below `min_scale` are left out: accumulation
divides by such numbers. Steps that PD306 speaks of, clipped before they were unscaled, are, too. Gradients that keep
their scale are not told: dividing the learning rate instead is the same to SGD.

So is `scaler.unscale_` that is called after every micro-batch, with `scaler.update()` in between so that it does not
raise, on `share` of the steps and more: each call divides the sum so far once again, and only the last micro-batch
counts. The recorder counts the calls on gradients that stayed as they were in between.

And so is a loss that `scaler.scale` was given, and that went into `backward` as it was, on `share` of the steps and
more: what `scale` returned was dropped, and `scaler.step` divides all the same.
""",
    matters="""
SGD takes steps S times too small, 65,536 times with a fresh `GradScaler`, and the loss stands still with nothing to be
seen but that. Adam divides constant factors out again and hides the fault, until the gradients are as small as its
eps; clipping never bites, and each change of the scale changes the step.
""",
    example="""
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())   # for a look at the norm
    scaler.step(optimizer)                # divides again: it was not told
""",
    remedy="""
Call `scaler.unscale_(optimizer)` instead of dividing by hand: the scaler remembers it, and `scaler.step` does not
unscale again. Call `backward` on what `scaler.scale` returns. When gradients are accumulated, unscale, step and update
behind the last micro-batch only.
""",
    confidence="""
0.95: both gradients were recorded. 0.8 when fewer than four steps were.
""",
    references=(
        "PyTorch documentation: Automatic Mixed Precision examples, working with unscaled gradients",
        "PyTorch source: torch/amp/grad_scaler.py, GradScaler.unscale_ and GradScaler.step",
    ),
)
_COLUMNS = ("root", "module", "kind", "name", "numel", "nan", "pos_inf", "neg_inf", "sum_sq", "scale")
_At = tuple[Process, int]


@dataclass
class _Step:
    scale: float
    #: Per weight what the optimizer was given over the unscaled gradient.
    factors: list[float] = field(default_factory=list)

    @property
    def factor(self) -> float:
        return median(self.factors)

    @property
    def off(self) -> float:
        """Binades between the factor and one more division by the scale."""
        return abs(math.log2(self.factor * self.scale)) if self.factor > 0.0 else math.inf


def check(view: RunView, options: Options) -> Checked:
    """One finding over all steps."""
    again = unscaled_twice.unscaled_again(view, options["share"])
    if again is not None:
        reason = f"{again.steps:,} of {plural(again.of, 'step')} unscaled several times"
        return Checked([unscaled_twice.finding(view, again, options["share"])], reason, Status.FAILED)
    unused = loss_not_scaled.scale_unused(view, options["share"])
    if unused is not None:
        reason = f"{unused.steps:,} of {plural(unused.of, 'step')} of a scaler began at an unscaled loss"
        return Checked([loss_not_scaled.finding(view, unused, options["share"])], reason, Status.FAILED)
    steps = {at: s for at, s in _survey(view).items() if s.scale >= options["min_scale"]}
    if not steps:
        return Checked.not_applicable("no weight gradient was recorded with its loss scale and without")
    guilty = {at: s for at, s in steps.items() if s.off <= options["tolerance"]}
    share = len(guilty) / len(steps)
    if not guilty or share < options["share"]:
        usual = median(s.factor for s in steps.values())
        return Checked((), f"gradients of {plural(len(steps), 'step')} unscaled; {usual:.3g} of that is given")
    finding = _finding(guilty, share, options)
    return Checked([finding], f"{len(guilty):,} of {plural(len(steps), 'step')} unscaled twice", Status.FAILED)


def _survey(view: RunView) -> Mapping[_At, _Step]:
    """Per step the weights whose gradient was recorded before unscaling and as the optimizer got it."""
    taken = {
        (p, s.step)
        for p, steps in view.timeline.items()
        for s in steps
        if s.complete and not s.skipped and not s.clipped_before_unscale  # PD306's
    }
    before: dict[tuple[_At, tuple[str, str, str]], tuple[float, float, int]] = {}
    after: dict[tuple[_At, tuple[str, str, str]], tuple[float, int]] = {}
    for r in view.scan_records(_COLUMNS, ("weight_grad", "weight_grad_step"), steps=watched_steps(view)):
        at = (Process(int(r["rank"]), int(r["attempt"])), int(r["step"]))
        energy, scale = number(r["sum_sq"]), number(r["scale"])
        if at not in taken or not energy or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        key = (at, (str(r["root"]), str(r["module"]), str(r["name"])))
        if r["kind"] == "weight_grad" and scale is not None and scale > 0.0:
            before[key] = (math.sqrt(energy) / scale, scale, int(r["numel"]))
        elif r["kind"] == "weight_grad_step" and scale in (None, 1.0):
            after[key] = (math.sqrt(energy), int(r["numel"]))
    found: dict[_At, _Step] = {}
    for key, (meant, scale, numel) in before.items():
        given = after.get(key)
        if given is not None and given[1] == numel:  # a shard of it has another norm
            found.setdefault(key[0], _Step(scale)).factors.append(given[0] / meant)
    return found


def _finding(guilty: Mapping[_At, _Step], share: float, options: Options) -> Finding:
    (process, first), facts = min(guilty.items(), key=lambda item: (item[0][0], item[0][1]))
    factor, few = median(s.factor for s in guilty.values()), len(guilty) < 4
    message = (
        f"On {plural(len(guilty), 'recorded step')} ({percent(share)}, limit {percent(options['share'])}) the optimizer"
        f" was given {factor:.3g} of the unscaled gradient, in the median of {plural(len(facts.factors), 'weight')}. "
        f"The loss scale is {facts.scale:g} at step {first}, and 1 / {facts.scale:g} is {1.0 / facts.scale:.3g}: "
        "somebody divided by it before the scaler did, or after."
    )
    return Finding(
        code="PD309",
        name="double-unscale",
        severity=Severity.ERROR,
        confidence=0.8 if few else 0.95,
        title=f"gradients are unscaled twice: the optimizer gets {factor:.3g} of them",
        message=message,
        location=Location(phase=Phase.OPTIMIZER, rank=process.rank, step=first),
        evidence={
            "given_share": factor,
            "loss_scale": facts.scale,
            "unscaled_twice_share": share,
            "limit": options["share"],
            "steps": len(guilty),
            "last_bad_step": max(step for _, step in guilty),
            "confidence_reason": "fewer than four steps were recorded" if few else "both gradients were recorded",
        },
        prescriptions=(
            Prescription(
                title=f"unscale once, by `scaler.unscale_`: share of the gradient that is given {factor:.3g} -> 1",
                change={"unscale": {"from": "twice", "to": "once"}},
                predicted={"given_share": {"from": factor, "to": 1.0}},
                snippet=(
                    "scaler.scale(loss).backward()\n"
                    "scaler.unscale_(optimizer)  # the only division; look at gradients and clip them from here on\n"
                    "scaler.step(optimizer)\n"
                    "scaler.update()\n"
                ),
            ),
        ),
    )


RULE = Rule(
    code="PD309",
    name="double-unscale",
    severity=Severity.ERROR,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        RuleOption(
            "tolerance",
            0.1,
            "binades",
            "Between the factor found and one more division by the scale.",
            "Precdoctor's own: the division is exact; a clipped norm wanders by more than 7 % from step to step.",
        ),
        RuleOption(
            "share",
            0.8,
            "fraction",
            "Of the recorded steps, at least.",
            "Precdoctor's own: the order of two calls is the same on every step; a clipped norm meets 1/S by chance.",
            maximum=1.0,
        ),
        RuleOption(
            "min_scale",
            256.0,
            "loss scale",
            "Smaller scales are not judged.",
            "Precdoctor's own: few runs accumulate over more micro-steps.",
            2.0,
        ),
    ),
    explains=when(anywhere, "PD303", "PD503", "PD506"),
    check=check,
    step_columns=("loss_scale",),
)
