"""Gradients that a scaler unscales again after each micro-batch: all but the last one's are divided more than once."""

from __future__ import annotations

from dataclasses import dataclass

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.histories import by_optimizer
from precdoctor.diagnosis.survey.rows import integer, text
from precdoctor.diagnosis.survey.view import Process, RunView


@dataclass(frozen=True)
class UnscaledAgain:
    """Attributes:
    process, root, optimizer: whose gradients.
    times: the most ``unscale_`` calls that one step's gradients have seen.
    steps, of: attempts whose gradients saw several, and all attempts.
    """

    process: Process
    root: str | None
    optimizer: str
    times: int
    steps: int
    of: int


def unscaled_again(view: RunView, share: float) -> UnscaledAgain | None:
    """The optimizer with most such steps, if they are this share of its steps; from the recorder's events."""
    found = []
    for process, event in view.warnings_about("unscaled-again"):
        data = event["data"]
        times, steps, of = (integer(data.get(name)) or 0 for name in ("times", "steps", "of"))
        root = text(event.get("root")) or None
        found.append(UnscaledAgain(process, root, text(data.get("optimizer")), times, steps, of))
    most = max(found, key=lambda u: (u.steps, -u.process.rank), default=None)
    return most if most is not None and most.times > 1 and most.steps >= share * max(most.of, 1) else None


def finding(view: RunView, found: UnscaledAgain, share: float) -> Finding:
    """That all but the last micro-batch are lost."""
    steps = [s for s in by_optimizer(view).get((found.process, found.optimizer), ()) if s.loss_scale]
    first = steps[0] if steps else None
    scale = (first.loss_scale if first is not None else None) or 1.0
    message = (
        f"On {plural(found.steps, 'step')} of {found.of:,} ({percent(found.steps / max(found.of, 1))}, limit "
        f"{percent(share)}) `scaler.unscale_` was called {found.times} times on gradients that stayed, with "
        "`scaler.update()` in between. Each call divides the whole sum so far by the loss scale"
        + (f", {scale:g} at step {first.step}" if first is not None else "")
        + f": the last micro-batch counts, the one before it with 1 / {scale:g}, those before that with less."
    )
    return Finding(
        code="PD309",
        name="double-unscale",
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"gradients are unscaled {found.times} times a step: one micro-batch of {found.times} counts",
        message=message,
        location=Location(
            root=found.root,
            module="" if found.root else None,
            phase=Phase.OPTIMIZER,
            rank=found.process.rank,
            step=first.step if first is not None else 0,
        ),
        evidence={
            "unscaled_times": found.times,
            "given_share": 1.0 / found.times,
            "loss_scale": scale,
            "unscaled_twice_share": found.steps / max(found.of, 1),
            "limit": share,
            "steps": found.steps,
            "confidence_reason": "the calls were observed, and that the gradients stayed between them",
        },
        prescriptions=(
            Prescription(
                title=f"unscale and update once a step: micro-batches that count 1 -> {found.times}",
                change={"unscale": {"from": "every micro-batch", "to": "before the step"}},
                predicted={"micro_batches_that_count": {"from": 1, "to": found.times}},
                snippet=(
                    "scaler.scale(loss / accumulated).backward()\n"
                    "if last_of_the_step:  # nothing of this in the other micro-batches\n"
                    "    scaler.unscale_(optimizer)\n"
                    "    scaler.step(optimizer)\n"
                    "    scaler.update()\n"
                    "    optimizer.zero_grad(set_to_none=True)\n"
                ),
            ),
        ),
    )
