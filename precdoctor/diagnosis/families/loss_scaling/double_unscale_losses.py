"""Losses that went into ``backward`` without the scale of the scaler that divided their gradients, for PD309."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Source, at_line
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import integer, source_of, text
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Minimum number of steps with passes of both kinds: each of them is a fault, but may be an accident.
_MIN_MIXED = 3


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

    def location(self, step: int | None = None) -> Location:
        root, module = self.root, "" if self.root else None
        return Location(root, module, phase=Phase.OPTIMIZER, step=step, source=self.source, **vars(self.process))


def counts(event: Mapping[str, Any], *names: str) -> Iterator[int]:
    """Yield numbers of a warning event's data; 0 for one that is missing."""
    return (integer(event["data"].get(name)) or 0 for name in names)


def worst_misuse(misuses: Iterator[Misuse], share: float) -> Misuse | None:
    """The misuse with most steps; None if its share of the steps is below ``share``."""
    worst = max(misuses, key=lambda m: (m.steps, -m.process.rank), default=None)
    return worst if worst is not None and worst.steps and worst.share >= share else None


def scale_at(facts: StepFacts | None) -> tuple[float, int]:
    """The loss scale and the number of a step; 1 and 0 for None."""
    return (1.0, 0) if facts is None else (facts.loss_scale or 1.0, facts.step)


def unscaled_losses(view: RunView) -> Iterator[Misuse]:
    """Yield per process the number of steps that ran ``backward`` only on losses passed to ``scaler.scale``."""
    for process, event in view.warnings_about("scale-unused"):
        steps, of = counts(event, "steps", "of")
        yield Misuse(process, steps, of, source=source_of(event))


def unscaled_loss_finding(rule: Rule, view: RunView, misuse: Misuse, limit: float) -> Finding:
    """The finding for ``backward`` on a loss that was passed to ``scaler.scale``."""
    steps = view.timeline.get(misuse.process, ())
    first = next((s for s in steps if s.loss_scale and s.loss_scale > 1.0), None)
    scale, step = scale_at(first)
    line = at_line(misuse.source)
    return rule.finding(
        confidence=0.95,
        title=f"gradients are divided by a loss scale of {scale:g} that the loss was not multiplied by{line}",
        message=f"On {plural(misuse.steps, 'step')} of {misuse.of:,} ({percent(misuse.share)}, limit "
        f"{percent(limit)}) the script called `backward` on the loss that it had passed to `scaler.scale`, "
        f"not on the result. `scaler.step` still divides: the optimizer gets gradients {scale:g} times too small, and "
        "nothing protects them from being flushed to zero in FP16.",
        location=misuse.location(step),
        evidence={
            "given_share": 1.0 / scale,
            "loss_scale": scale,
            "unscaled_loss_share": misuse.share,
            "limit": limit,
            "steps": misuse.steps,
            "confidence_reason": "the tensors were the same object",
        },
        prescription=Prescription(
            title=f"call backward on the result of `scaler.scale`{line}: gradients x {scale:g}",
            change={"backward": {"from": "loss", "to": "scaler.scale(loss)"}},
            predicted={"given_share": {"from": 1.0 / scale, "to": 1.0}},
            snippet="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n",
        ),
    )


def mixed_losses(view: RunView) -> Iterator[Misuse]:
    """Yield per optimizer the number of steps with gradients of passes with and without the scale."""
    for process, event in view.warnings_about("mixed-scale"):
        steps, of = counts(event, "steps", "of")
        if steps >= _MIN_MIXED:
            optimizer = text(event["data"].get("optimizer"))
            yield Misuse(process, steps, of, optimizer=optimizer, source=source_of(event))


def mixed_loss_finding(rule: Rule, view: RunView, misuse: Misuse, _limit: float) -> Finding:
    """The finding for a second loss without the scale, beside one that has it."""
    steps = by_optimizer(view).get((misuse.process, misuse.optimizer), ())
    scale, step = scale_at(next((s for s in steps if s.loss_scale and s.loss_scale > 1.0), None))
    line = at_line(misuse.source)
    return rule.finding(
        confidence=0.95,
        title=f"gradients of a second loss are divided by a loss scale of {scale:g} that it lacks{line}",
        message=f"On {plural(misuse.steps, 'step')} of {misuse.of:,} (limit {_MIN_MIXED}) gradients of "
        f"{misuse.optimizer} are the sum of a loss that `scaler.scale` multiplied and of one that it did not. "
        f"`scaler.step` divides the sum by {scale:g}: the loss without the scale counts "
        f"{1.0 / scale:.3g} of what it should.",
        location=misuse.location(step),
        evidence={
            "given_share": 1.0 / scale,
            "loss_scale": scale,
            "mixed_share": misuse.share,
            "limit": _MIN_MIXED,
            "steps": misuse.steps,
            "confidence_reason": "the root of each backward pass was compared with what `scaler.scale` returned",
        },
        prescription=Prescription(
            title=f"scale every loss before its `backward`{line}: gradients x {scale:g}",
            change={"backward": {"from": "loss", "to": "scaler.scale(loss)"}},
            predicted={"given_share": {"from": 1.0 / scale, "to": 1.0}},
            snippet=(
                "scaler.scale(loss).backward(retain_graph=True)\n"
                "scaler.scale(auxiliary_loss).backward()\n"
                "scaler.step(optimizer)\n"
                "scaler.update()\n"
            ),
        ),
    )
