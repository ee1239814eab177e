"""PD309, division by hand: the sum of gradients is divided after each micro-batch, so that only the last one counts."""

from __future__ import annotations

from dataclasses import dataclass

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Source
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.view import Process

#: Largest factor that is reported: the micro-batch before the last one then counts half. Chosen empirically.
MAX_FACTOR = 0.5
#: Minimum number of measured steps: on a single one, two factors may be equal by chance.
MIN_STEPS = 3


@dataclass(frozen=True)
class Misuse:
    """A misuse of loss scaling, from a warning event of the recorder.

    Attributes:
        steps, of: number of step attempts with the misuse, and of all step attempts of the scaler; for ``factor``, of
            all measured steps with several backward passes.
        times: largest number of ``unscale_`` calls on the gradients of one step, or of divisions.
        source: line of the first ``backward`` call on an unscaled loss.
        factor: what the gradients were multiplied by after each backward pass; 1 if nothing did that.
    """

    process: Process
    steps: int
    of: int
    root: str | None = None
    optimizer: str = ""
    times: int = 0
    source: Source | None = None
    factor: float = 1.0

    @property
    def share(self) -> float:
        return self.steps / max(self.of, 1)


def rescaled_finding(rule: Rule, misuse: Misuse, limit: float) -> Finding:
    """The finding for gradients that were divided after each backward pass; ``limit`` is the minimum share of steps."""
    factor, passes = misuse.factor, misuse.times
    counted = sum(factor**k for k in range(passes))  # relative to the last micro-batch
    divisor = f"{1.0 / factor:.4g}"
    return rule.finding(
        confidence=0.95 if misuse.steps > MIN_STEPS else 0.8,
        title=f"gradients are divided by {divisor} after each of {passes} backward passes: {counted:.3g} of {passes} "
        "micro-batches count",
        message=(
            f"On {plural(misuse.steps, 'sampled step')} of {misuse.of:,} with several backward passes "
            f"({percent(misuse.share)}, limit {percent(limit)}) something divided the gradients of {misuse.optimizer} "
            f"by {divisor} after every pass. Each division includes the whole sum so far. Relative to the last "
            f"micro-batch, the one before it counts {factor:.3g} and the first one {factor ** (passes - 1):.3g}."
        ),
        location=Location(misuse.root, "" if misuse.root else None, phase=Phase.OPTIMIZER, **vars(misuse.process)),
        evidence={
            "factor": factor,
            "unscaled_times": passes,
            "given_share": counted / passes,
            "unscaled_twice_share": misuse.share,
            "limit": limit,
            "steps": misuse.steps,
            "confidence_reason": "the norms of gradients were measured before and after"
            + ("" if misuse.steps > MIN_STEPS else "; on fewer than four steps"),
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
