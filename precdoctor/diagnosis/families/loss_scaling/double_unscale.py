"""PD309: gradients are divided by the loss scale twice, or by a scale that the loss was never multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.histories import by_optimizer, watched_steps
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.double_unscale_losses import (
    Misuse,
    counts,
    mixed_loss_finding,
    mixed_losses,
    scale_at,
    unscaled_loss_finding,
    unscaled_losses,
    worst_misuse,
)
from precdoctor.diagnosis.survey.frames import AT, at, finite, firsts, groups, on_steps, pairs
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.rows import location, number, text
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Gradients that reach the optimizer too small by the loss scale. The log holds both gradients: the one that the backward
pass left, still multiplied by the scale S, and the one that the optimizer gets. Their ratio is 1/S, times one factor
common to all weights if the norm is clipped. A step counts if that factor is 1/S once more, to within `tolerance`
binades, in the median of the weights; the finding needs a `share` of such steps. Scales below `min_scale` are not
evaluated, because accumulation divides by such numbers; nor are steps that PD306 reports, clipped before unscaling.
Gradients that keep their scale are no finding: dividing the learning rate instead is equivalent under SGD.

The same happens if `scaler.unscale_` is called after every micro-batch, with `scaler.update()` in between so that it
does not raise: each call divides the sum so far once again, and only the last micro-batch counts. The recorder counts
the calls on gradients that stay in between; the finding needs a `share` of such steps.

A script that divides by hand after every micro-batch does the same, whatever the divisor: the loss scale, or the number
of micro-batches. On sampled steps with several backward passes the recorder measures gradients after each pass, and
before the next pass or the step. It counts the steps on which all of these factors are equal. The finding needs three
such steps, a `share` of all, and a factor of at most one half. Factors that differ, as those of clipping, do not count.

It also happens if the script passes a loss to `scaler.scale` but calls `backward` on the loss itself: the result of
`scale` is lost, and `scaler.step` still divides. The finding needs a `share` of such steps.
""",
    matters="""
SGD takes steps S times too small, 65,536 times with a fresh `GradScaler`; the loss stands still, and nothing else shows
it. Adam divides constant factors out again and hides the fault, until the gradients are as small as its eps. Clipping
never takes effect, and each change of the scale changes the step.
""",
    example="""
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())   # to print the norm
    scaler.step(optimizer)                # divides again
""",
    remedy="""
Call `scaler.unscale_(optimizer)` instead of dividing by hand: the scaler remembers it, and `scaler.step` does not
unscale again. Call `backward` on the result of `scaler.scale`. When you accumulate gradients, unscale, step and update
only after the last micro-batch.
""",
    confidence="""
0.95: both gradients were recorded, or the calls were observed. 0.8 if fewer than four steps were recorded.
""",
    references=(
        "PyTorch documentation: Automatic Mixed Precision examples, working with unscaled gradients",
        "PyTorch source: torch/amp/grad_scaler.py, GradScaler.unscale_ and GradScaler.step",
    ),
)
_COLUMNS = ("numel", "nan", "pos_inf", "neg_inf")
#: Process and step.
_StepKey = tuple[Process, int]
#: Largest factor that is reported: the micro-batch before the last one then counts half. Chosen empirically.
_MAX_FACTOR = 0.5
#: Minimum number of measured steps: on a single one, two factors may be equal by chance.
_MIN_STEPS = 3


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: repeated ``unscale_`` calls or divisions, ``backward`` on an unscaled loss, or the ratio."""
    share = options["share"]
    for misuses, least, finding, words in (
        (_repeated_unscales(view), share, _repeated_finding, "unscaled several times"),
        (_rescaled_sums(view), share, _rescaled_finding, "with sums that were rescaled after each pass"),
        (unscaled_losses(view), share, unscaled_loss_finding, "of a scaler began at an unscaled loss"),
        (mixed_losses(view), 0.0, mixed_loss_finding, "add an unscaled loss to a scaled one"),
    ):
        if (worst := worst_misuse(misuses, least)) is not None:
            reason = f"{worst.steps:,} of {plural(worst.of, 'step')} {words}"
            return Checked([finding(RULE, view, worst, share)], reason)
    steps = {at: s for at, s in _survey(view).items() if s.scale >= options["min_scale"]}
    if not steps:
        return Checked.not_applicable("no weight gradient was recorded with its loss scale and without")
    guilty = {at: s for at, s in steps.items() if s.distance <= options["tolerance"]}
    found = len(guilty) / len(steps)
    if not guilty or found < share:
        usual = median(s.factor for s in steps.values())
        return Checked((), f"the optimizer gets {usual:.3g} of the unscaled gradients on {plural(len(steps), 'step')}")
    return Checked([_finding(guilty, found, share)], f"{len(guilty):,} of {plural(len(steps), 'step')} unscaled twice")


# -- both gradients recorded ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One step with both gradients recorded.

    Attributes:
        factor: norm of the gradient that the optimizer got, as a multiple of the unscaled and clipped one; median over
            the weights.
        weights: number of weights with both gradients.
    """

    scale: float
    factor: float
    weights: int

    @property
    def distance(self) -> float:
        """Distance in binades of the factor from 1 / scale, the factor of one more division; infinite for 0."""
        return abs(math.log2(self.factor * self.scale)) if self.factor > 0.0 else math.inf


def _survey(view: RunView) -> Mapping[_StepKey, _Step]:
    """The steps with weight gradients that were recorded both before unscaling and as the optimizer got them."""
    clips = {
        (p, s.step): min(1.0, s.clip_norm / s.grad_norm) if s.clip_norm and s.grad_norm else 1.0
        for p, steps in view.timeline.items()
        for s in steps
        # PD306 reports clips before unscaling; of a first step the order is not known.
        if s.complete and not s.skipped and (s.clip_norm is None or s.clipped_before_unscale is False)
    }
    kinds = ("weight_grad", "weight_grad_step")
    rows = view.measured(("norm",), kinds, columns=_COLUMNS, steps=watched_steps(view))
    scale = rows["scale"]
    relevant = np.where(rows["kind"] == "weight_grad", scale > 1.0, scale.isna() | (scale == 1.0))
    rows = rows[relevant & finite(rows) & (rows["norm"] > 0.0) & on_steps(rows, clips)]
    before, after = pairs(rows, *kinds)
    same_size = column(before, "numel") == column(after, "numel")  # a shard of a gradient has another norm
    factors = (column(after, "norm") / column(before, "norm"))[same_size]
    before = before[same_size]
    ids = groups(before, AT)
    first, middle = before.iloc[firsts(ids)], pd.Series(factors).groupby(ids).median()
    columns = zip(first["scale"], middle, np.bincount(ids).tolist(), strict=True)
    found = zip(at(first), columns, strict=True)
    return {key: _Step(scale, factor / clips[key], weights) for key, (scale, factor, weights) in found}


def _finding(guilty: Mapping[_StepKey, _Step], share: float, limit: float) -> Finding:
    (process, first), facts = min(guilty.items(), key=lambda item: item[0])
    factor, few = median(s.factor for s in guilty.values()), len(guilty) < 4
    return RULE.finding(
        confidence=0.8 if few else 0.95,
        title=f"gradients are unscaled twice: the optimizer gets {factor:.3g} of them",
        message=f"On {plural(len(guilty), 'recorded step')} ({percent(share)}, limit {percent(limit)}) the "
        f"optimizer got {factor:.3g} of the unscaled gradient, in the median of {plural(facts.weights, 'weight')}. The "
        f"loss scale is {facts.scale:g} at step {first}, and 1 / {facts.scale:g} is {1.0 / facts.scale:.3g}: the "
        "script divided by it once more, before or after the scaler.",
        location=location(None, Phase.OPTIMIZER, process, first),
        evidence={
            "given_share": factor,
            "loss_scale": facts.scale,
            "unscaled_twice_share": share,
            "limit": limit,
            "steps": len(guilty),
            "last_bad_step": max(step for _, step in guilty),
            "confidence_reason": "fewer than four steps were recorded" if few else "both gradients were recorded",
        },
        prescription=Prescription(
            title=f"unscale once, by `scaler.unscale_`: share of the gradient that arrives {factor:.3g} -> 1",
            change={"unscale": {"from": "twice", "to": "once"}},
            predicted={"given_share": {"from": factor, "to": 1.0}},
            snippet=(
                "scaler.scale(loss).backward()\n"
                "scaler.unscale_(optimizer)  # the only division; read gradients and clip them after it\n"
                "scaler.step(optimizer)\n"
                "scaler.update()\n"
            ),
        ),
    )


# -- calls that the recorder observed ---------------------------------------------------------------------------------


def _repeated_unscales(view: RunView) -> Iterator[Misuse]:
    """Yield per optimizer the number of steps whose gradients were unscaled several times."""
    for process, event in view.warnings_about("unscaled-again"):
        steps, of, times = counts(event, "steps", "of", "times")
        root, optimizer = text(event.get("root")) or None, text(event["data"].get("optimizer"))
        if times > 1:
            yield Misuse(process, steps, of, root, optimizer, times)


def _rescaled_sums(view: RunView) -> Iterator[Misuse]:
    """Yield per optimizer the number of steps whose gradients were divided after each of several backward passes."""
    for process, event in view.warnings_about("rescaled-sum"):
        steps, of, passes = counts(event, "steps", "of", "passes")
        root, factor = text(event.get("root")) or None, number(event["data"].get("factor")) or 1.0
        if passes > 1 and steps >= _MIN_STEPS and 0.0 < factor <= _MAX_FACTOR:
            yield Misuse(process, steps, of, root, text(event["data"].get("optimizer")), passes, factor=factor)


def _repeated_finding(rule: Rule, view: RunView, misuse: Misuse, limit: float) -> Finding:
    steps = by_optimizer(view).get((misuse.process, misuse.optimizer), ())
    first = next((s for s in steps if s.loss_scale), None)
    scale, step = scale_at(first)
    message = (
        f"On {plural(misuse.steps, 'step')} of {misuse.of:,} ({percent(misuse.share)}, limit "
        f"{percent(limit)}) the script called `scaler.unscale_` {misuse.times} times on the same gradients, "
        "with `scaler.update()` in between. Each call divides the whole sum so far by the loss scale"
        + (f", {scale:g} at step {step}" if first is not None else "")
        + ". The last micro-batch counts in full, the one before it "
        + (f"with 1 / {scale:g}" if first is not None else "divided once more")
        + ", earlier ones with less."
    )
    return rule.finding(
        confidence=0.95,
        title=f"gradients are unscaled {misuse.times} times a step: one micro-batch of {misuse.times} counts",
        message=message,
        location=misuse.location(step),
        evidence={
            "unscaled_times": misuse.times,
            "given_share": 1.0 / misuse.times,
            "loss_scale": scale,
            "unscaled_twice_share": misuse.share,
            "limit": limit,
            "steps": misuse.steps,
            "confidence_reason": "the calls were observed, and the gradients stayed between them",
        },
        prescription=Prescription(
            title=f"unscale and update once a step: micro-batches that count 1 -> {misuse.times}",
            change={"unscale": {"from": "every micro-batch", "to": "before the step"}},
            predicted={"micro_batches_that_count": {"from": 1, "to": misuse.times}},
            snippet=(
                "scaler.scale(loss / accumulated).backward()\n"
                "if last_of_the_step:  # not in the other micro-batches\n"
                "    scaler.unscale_(optimizer)\n"
                "    scaler.step(optimizer)\n"
                "    scaler.update()\n"
                "    optimizer.zero_grad(set_to_none=True)\n"
            ),
        ),
    )


def _rescaled_finding(rule: Rule, _view: RunView, misuse: Misuse, limit: float) -> Finding:
    """The finding for gradients that were divided after each backward pass."""
    factor, passes = misuse.factor, misuse.times
    counted = sum(factor**k for k in range(passes))  # relative to the last micro-batch
    divisor = f"{1.0 / factor:.4g}"
    return rule.finding(
        confidence=0.95 if misuse.steps > _MIN_STEPS else 0.8,
        title=f"gradients are divided by {divisor} after each of {passes} backward passes: {counted:.3g} of {passes} "
        "micro-batches count",
        message=f"On {plural(misuse.steps, 'sampled step')} of {misuse.of:,} with several backward passes "
        f"({percent(misuse.share)}, limit {percent(limit)}) something divided the gradients of {misuse.optimizer} by "
        f"{divisor} after every pass. Each division includes the whole sum so far. Relative to the last micro-batch, "
        f"the one before it counts {factor:.3g} and the first one {factor ** (passes - 1):.3g}.",
        location=misuse.location(),
        evidence={
            "factor": factor,
            "unscaled_times": passes,
            "given_share": counted / passes,
            "unscaled_twice_share": misuse.share,
            "limit": limit,
            "steps": misuse.steps,
            "confidence_reason": "the norms of gradients were measured before and after"
            + ("" if misuse.steps > _MIN_STEPS else "; on fewer than four steps"),
        },
        prescription=Prescription(
            title=f"divide once a step: micro-batches that count {counted:.3g} -> {passes}",
            change={"unscale": {"from": "every micro-batch", "to": "before the step"}},
            predicted={"micro_batches_that_count": {"from": counted, "to": passes}},
            snippet=(
                "for inputs, targets in micro_batches:\n"
                "    (loss_fn(model(inputs), targets) * scale).backward()\n"
                "for p in model.parameters():  # after the last micro-batch only\n"
                "    p.grad.div_(scale)\n"
                "optimizer.step()\n"
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
        RuleOption("tolerance", 0.1, "binades", "Distance of the found factor from one more division by the scale.",
                   "Chosen empirically: the division is exact; a clipped norm varies by more than 7 % between steps."),
        fraction("share", 0.8, "Minimum share of the recorded steps.",
                 "Chosen empirically: the order of two calls is the same on every step; a clipped norm meets 1/S by "
                 "chance."),
        RuleOption("min_scale", 256.0, "loss scale", "Minimum loss scale.",
                   "Chosen empirically: few runs accumulate over more micro-steps.", 2.0),
    ),
    explains=when(anywhere, "PD303", "PD503", "PD506"),
    check=check,
    newer_half=True,
)  # fmt: skip
