"""PD511, schedules that return a learning rate where a factor is expected, so that the rate is the product of two.

``torch.optim.lr_scheduler.LambdaLR`` multiplies the optimizer's rate (``initial_lr``) by what its function returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import number, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Largest rate that an optimizer is made with to train at it. Some are made with 1, for a schedule that returns rates
#: (Vaswani et al., arXiv:1706.03762, in most implementations).
_REAL_RATE = 0.1
#: Share of the run at whose end a largest rate belongs to a warm-up that outlasts it.
_END = 0.1
#: How far the largest rate may be from the square of the optimizer's own; rates are rounded.
_SQUARE = 0.01


def find_factor(
    rule: Rule, view: RunView, process: Process, optimizer: str, steps: Sequence[StepFacts], options: Options
) -> Finding | None:
    """Return the finding about an optimizer whose rate stays far below the one it was made with; None if it does not.

    None also for an optimizer that continues earlier steps, for the log may hold the end of a schedule.
    """
    every = view.facts(process).get("optimizers") or ()
    facts = next((o for o in every if text(o.get("name")) == optimizer and not o.get("steps_before")), None)
    made_with = [number(g.get("initial_lr")) or 0.0 for g in (facts or {}).get("groups") or ()]
    rates = [s.lr or 0.0 for s in steps]
    base, peak = max(made_with, default=0.0), max(rates, default=0.0)
    if len(steps) < options["min_steps"] or not 0.0 < base <= _REAL_RATE or not 0.0 < peak <= options["factor"] * base:
        return None
    if rates.index(peak) >= (1.0 - _END) * len(rates):
        return None
    squared = abs(peak / base**2 - 1.0) <= _SQUARE
    likely = (
        "The largest rate is the square of that one: the schedule returned a rate, and that multiplied the optimizer's."
        if squared
        else "A schedule multiplies the optimizer's rate by what its function returns; most likely that is a rate."
    )
    return rule.finding(
        confidence=0.95 if squared else 0.8,
        title=f"the learning rate of {optimizer} never exceeds {peak:.3g}; the optimizer was made with {base:.3g}",
        message=f"Over {plural(len(steps), 'step')} the learning rate of {optimizer} is at most "
        f"{peak / base:.2g} times the one it was made with (limit {options['factor']:.2g}). {likely}",
        location=Location(phase=Phase.OPTIMIZER, rank=process.rank, step=steps[0].step),
        evidence={
            "largest_rate": peak,
            "initial_lr": base,
            "limit": options["factor"],
            "confidence_reason": "both rates are recorded",
        },
        prescription=Prescription(
            title=f"let the schedule return a factor, not a rate: largest rate {peak:.3g} -> {base:.3g}",
            change={"schedule": {"from": "a rate", "to": "a factor"}},
            predicted={"largest_rate": {"from": peak, "to": base}},
            snippet="scheduler = torch.optim.lr_scheduler.LambdaLR(\n"
            "    optimizer, lambda step: rate_at(step) / base_rate  # a factor: base_rate is the optimizer's lr\n)\n",
        ),
    )
