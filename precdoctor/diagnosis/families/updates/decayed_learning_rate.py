"""PD511: optimizer steps after the learning rate has decayed to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.analyses.parameters import module_of_optimizer
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.decayed_learning_rate_factor import find_factor
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
The last steps of a run, if their learning rates together are at most `negligible` of the sum over all steps of that
optimizer: at least `min_steps` steps, and `share` of all its steps. The rate of a step is the largest of its parameter
groups. Else the same for the rates of one group, unless they end at 0, which freezes it on purpose. Optimizers and
groups whose rate is always 0 are left out.

Also an optimizer whose rate, over at least `min_steps` steps, never exceeds `factor` of the rate that it was made with
(torch's `initial_lr`) and is not at its largest at the end: a schedule returned a rate where a factor is expected.
Left out are optimizers made with a rate above 0.1, as for the schedule of "Attention Is All You Need", and those that
continue earlier steps.
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
0.9: the learning rate is recorded on every step. That nobody wanted to end the training there is an assumption. 0.95
if the largest rate is the square of the optimizer's own, 0.8 if it is another small part of it.
""",
    references=("PyTorch documentation: torch.optim, How to adjust learning rate",),
)

#: Factor by which a schedule may be longer or shorter than as many optimizer steps as the run has. Chosen empirically.
_ABOUT_ONE = 1.5


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first optimizer, else parameter group, that spends the end of the run at a negligible rate."""
    longest = 0
    every = by_optimizer(view).items()
    for (process, optimizer), steps in every:
        known = [s for s in steps if s.lr is not None]
        idle = _idle([s.lr or 0.0 for s in known], options["negligible"])
        longest = max(longest, idle)
        if idle >= max(options["min_steps"], options["share"] * len(known)):
            root, module = module_of_optimizer(view, process, optimizer)
            place = Location(root, module or None, phase=Phase.OPTIMIZER, rank=process.rank, step=known[-idle].step)
            finding = _finding(place, optimizer, known, [s.lr or 0.0 for s in known], idle, options)
            return Checked([finding], finding.title, Status.FAILED)
        if (factor := find_factor(RULE, view, process, optimizer, known, options)) is not None:
            return Checked([factor], factor.title, Status.FAILED)
    for (process, optimizer), steps in every:
        for number in range(len(steps[0].lrs) if len({len(s.lrs) for s in steps}) == 1 else 0):
            rates = [s.lrs[number] for s in steps]
            idle = _idle(rates, options["negligible"])
            if idle < max(options["min_steps"], options["share"] * len(rates)) or not median(rates[-idle:]):
                continue  # a rate of 0 freezes a group on purpose
            root, module = module_of_optimizer(view, process, optimizer, number)
            place = Location(root, module, phase=Phase.OPTIMIZER, rank=process.rank, step=steps[-idle].step)
            what = f"parameter group {number} of {optimizer}{f' (`{module}`)' if module else ''}"
            finding = _finding(place, what, steps, rates, idle, options)
            return Checked([finding], finding.title, Status.FAILED)
    return Checked((), f"{plural(longest, 'step')} at the end of a decayed learning rate")


def _idle(rates: Sequence[float], most: float) -> int:
    """Return the number of last steps whose rates together are at most ``most`` of the sum of all; 0 if all are 0."""
    left = list(accumulate(reversed(rates)))
    return sum(rest <= most * left[-1] for rest in left) if left and left[-1] > 0.0 else 0


def _finding(
    place: Location, whose: str, steps: Sequence[StepFacts], rates: Sequence[float], idle: int, options: Options
) -> Finding:
    first, peak, left = steps[-idle].step, max(rates), rates[-idle:]
    share, part = idle / len(rates), sum(left) / sum(rates)
    return RULE.finding(
        confidence=0.9,
        title=f"the learning rate has decayed to {left[-1]:.3g}: the last {idle:,} of {len(rates):,} steps of "
        f"{whose} hardly move the weights",
        message=f"From step {first:,} on the learning rate of {whose} is at most {max(left):.3g}; its largest "
        f"is {peak:.3g}. The rates of these {percent(share)} of the steps (limit {percent(options['share'])}) are "
        f"together {part:.2g} of the sum of all (limit {options['negligible']:.2g}).",
        location=place,
        evidence={
            "idle_steps": idle,
            "share": share,
            "limit": options["share"],
            "part_of_rates": part,
            "largest_rate": peak,
            "last_rate": left[-1],
            "confidence_reason": "the learning rate is recorded on every step",
        },
        prescription=_per_update(steps, idle) if _ran_per_micro_batch(steps, idle) else _per_epoch(idle),
    )


def _ran_per_micro_batch(steps: Sequence[StepFacts], idle: int) -> bool:
    """Return whether the rate was gone after one step in k, at k micro-batches per step."""
    micro_batches = median(s.micro_steps for s in steps)
    ran = (len(steps) - idle) * micro_batches / len(steps)
    return micro_batches >= 2.0 and 1.0 / _ABOUT_ONE <= ran <= _ABOUT_ONE


def _per_update(steps: Sequence[StepFacts], idle: int) -> Prescription:
    micro_batches = median(s.micro_steps for s in steps)
    return Prescription(
        title=f"advance the schedule once per optimizer step, not on each of its {micro_batches:g} micro-batches: idle "
        f"steps {idle:,} -> 0",
        change={"schedule": {"from": "per micro-batch", "to": "per optimizer step"}},
        predicted={"idle_steps": {"from": idle, "to": 0}},
        snippet=f"for i, batch in enumerate(loader, 1):\n    ...\n    if i % {micro_batches:g} == 0:\n"
        "        optimizer.step()\n        scheduler.step()  # here, not after each backward()\n"
        "        optimizer.zero_grad()\n",
    )


def _per_epoch(idle: int) -> Prescription:
    return Prescription(
        title=f"advance the schedule once per epoch, or stretch it over the run: idle steps {idle:,} -> 0",
        change={"schedule": {"from": "per batch", "to": "per epoch"}},
        predicted={"idle_steps": {"from": idle, "to": 0}},
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
        fraction("factor", 2.0**-7, "Largest part of the optimizer's own rate that a schedule makes of it."),
    ),
    check=check,
    sampled_steps=False,
)  # fmt: skip
