"""PD511: optimizer steps after the learning rate has decayed to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
The last steps of a run, if their learning rates together are at most `negligible` of the sum over all steps of that
optimizer: at least `min_steps` steps, and `share` of all its steps. The rate of a step is the largest of its parameter
groups. Optimizers whose rate is always 0 are left out.
""",
    matters="""
These steps cost as much as any other and hardly move a weight. The loss stops falling, which looks like convergence.
Usually a schedule that counts epochs is advanced once per batch, or got the number of epochs as its length. With
gradient accumulation, one that counts optimizer steps may be advanced once per micro-batch.
""",
    example="""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for batch in loader:
        ...
        scheduler.step()   # belongs after the loop over the batches: after 160 of them the rate is 2^-24 of its start
""",
    remedy="""
Advance the schedule once per epoch, or once per optimizer step and give it their number as its length.
""",
    confidence="""
0.9: the learning rate is recorded on every step. That nobody wanted to end the training there is an assumption.
""",
    references=("PyTorch documentation: torch.optim, How to adjust learning rate",),
)

#: Factor by which a schedule may be longer or shorter than as many optimizer steps as the run has. Chosen empirically.
_ABOUT_ONE = 1.5


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first optimizer that spends the end of the run at a negligible rate."""
    longest = 0
    for (process, optimizer), steps in by_optimizer(view).items():
        known = [s for s in steps if s.lr is not None]
        idle = _tail(known, options["negligible"])
        longest = max(longest, len(idle))
        if len(idle) >= max(options["min_steps"], options["share"] * len(known)):
            finding = _finding(process, optimizer, known, idle, options)
            return Checked([finding], finding.title, Status.FAILED)
    return Checked((), f"{plural(longest, 'step')} at the end of a decayed learning rate")


def _tail(steps: Sequence[StepFacts], most: float) -> Sequence[StepFacts]:
    """Return the last steps, whose rates together are at most ``most`` of the sum of all; none if all are 0."""
    left = list(accumulate(s.lr or 0.0 for s in reversed(steps)))[::-1]
    if not left or not left[0]:
        return []
    return steps[next((i for i, rest in enumerate(left) if rest <= most * left[0]), len(left)) :]


def _finding(
    process: Process, optimizer: str, known: Sequence[StepFacts], idle: Sequence[StepFacts], options: Options
) -> Finding:
    rates, first, last = [s.lr or 0.0 for s in known], idle[0], idle[-1].lr or 0.0
    share, peak = len(idle) / len(known), max(rates)
    left = rates[-len(idle) :]
    part = sum(left) / sum(rates)
    return RULE.finding(
        confidence=0.9,
        title=f"the learning rate has decayed to {last:.3g}: the last {len(idle):,} of {len(known):,} steps of "
        f"{optimizer} hardly move the weights",
        message=f"From step {first.step:,} on the learning rate of {optimizer} is at most {max(left):.3g}; its largest "
        f"is {peak:.3g}. The rates of these {percent(share)} of the steps (limit {percent(options['share'])}) are "
        f"together {part:.2g} of the sum of all (limit {options['negligible']:.2g}).",
        location=Location(phase=Phase.OPTIMIZER, rank=process.rank, step=first.step),
        evidence={
            "idle_steps": len(idle),
            "share": share,
            "limit": options["share"],
            "part_of_rates": part,
            "largest_rate": peak,
            "last_rate": last,
            "confidence_reason": "the learning rate is recorded on every step",
        },
        prescription=_per_update(known, idle) if _ran_per_micro_batch(known, idle) else _per_epoch(idle),
    )


def _ran_per_micro_batch(known: Sequence[StepFacts], idle: Sequence[StepFacts]) -> bool:
    """Return whether the rate was gone after one step in k, at k micro-batches per step."""
    micro_batches = median(s.micro_steps for s in known)
    ran = (len(known) - len(idle)) * micro_batches / len(known)
    return micro_batches >= 2.0 and 1.0 / _ABOUT_ONE <= ran <= _ABOUT_ONE


def _per_update(known: Sequence[StepFacts], idle: Sequence[StepFacts]) -> Prescription:
    micro_batches = median(s.micro_steps for s in known)
    return Prescription(
        title=f"advance the schedule once per optimizer step, not on each of its {micro_batches:g} micro-batches: idle "
        f"steps {len(idle):,} -> 0",
        change={"schedule": {"from": "per micro-batch", "to": "per optimizer step"}},
        predicted={"idle_steps": {"from": len(idle), "to": 0}},
        snippet=f"for i, batch in enumerate(loader, 1):\n    ...\n    if i % {micro_batches:g} == 0:\n"
        "        optimizer.step()\n        scheduler.step()  # here, not after each backward()\n"
        "        optimizer.zero_grad()\n",
    )


def _per_epoch(idle: Sequence[StepFacts]) -> Prescription:
    return Prescription(
        title=f"advance the schedule once per epoch, or stretch it over the run: idle steps {len(idle):,} -> 0",
        change={"schedule": {"from": "per batch", "to": "per epoch"}},
        predicted={"idle_steps": {"from": len(idle), "to": 0}},
        snippet="for epoch in range(epochs):\n    for batch in loader:\n        ...\n        optimizer.step()\n"
        "    scheduler.step()  # or after each batch, with a schedule as long as epochs * len(loader)\n",
    )


RULE = Rule(
    code="PD511",
    name="decayed-learning-rate",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("negligible", 2.0**-11, "Largest part of the sum of all rates that counts as none.",
                 "The last half has as much if an exponential schedule ends at 2^-22; of a cosine it has 0.18."),
        RuleOption("min_steps", 16.0, "steps", "Minimum number of steps at such a rate.", minimum=1.0),
        fraction("share", 0.5, "Minimum share of the optimizer's steps.",
                 "Chosen empirically: half of the run; schedules may end with a long tail."),
    ),
    check=check,
    sampled_steps=False,
    step_columns=("lr", "micro_steps"),
)  # fmt: skip
