"""Losses that went into ``backward`` as they were, beside a scaler that unscales their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Source
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import integer, text
from precdoctor.diagnosis.survey.view import Process, RunView


@dataclass(frozen=True)
class ScaleUnused:
    """Attributes:
    process: whose scaler.
    steps, of: steps of it all of whose backward passes began at a loss it had been given, unscaled; and all its steps.
    """

    process: Process
    steps: int
    of: int
    #: Of the first of them, where ``backward`` was called.
    source: Source | None


def scale_unused(view: RunView, share: float) -> ScaleUnused | None:
    """The process with most such steps, if they are this share of its steps; from the recorder's events."""
    found = []
    for process, event in view.warnings_about("scale-unused"):
        steps, of = (integer(event["data"].get(name)) or 0 for name in ("steps", "of"))
        file, line = text(event.get("file")), integer(event.get("line"))
        found.append(ScaleUnused(process, steps, of, Source(file, line, None) if file and line else None))
    most = max(found, key=lambda u: (u.steps, -u.process.rank), default=None)
    return most if most is not None and most.steps and most.steps >= share * max(most.of, 1) else None


def finding(view: RunView, found: ScaleUnused, share: float) -> Finding:
    """That gradients are too small by the scale."""
    scaled = [s for s in view.timeline.get(found.process, ()) if s.loss_scale and s.loss_scale > 1.0]
    first = scaled[0] if scaled else None
    scale = (first.loss_scale if first is not None else None) or 1.0
    line = f" at {found.source.file}:{found.source.line}" if found.source is not None else ""
    part = percent(found.steps / max(found.of, 1))
    return Finding(
        code="PD309",
        name="double-unscale",
        severity=Severity.ERROR,
        confidence=0.95,
        title=f"gradients are divided by a loss scale of {scale:g} that the loss was not multiplied by{line}",
        message=(
            f"On {plural(found.steps, 'step')} of {found.of:,} ({part}, limit {percent(share)}) `backward` began at "
            "the loss that `scaler.scale` had been given, not at what it returned. `scaler.step` divides all the same: "
            f"the optimizer is given gradients {scale:g} times too small, and nothing keeps them from being flushed to "
            "zero in FP16."
        ),
        location=Location(
            phase=Phase.OPTIMIZER,
            rank=found.process.rank,
            step=first.step if first is not None else 0,
            source=found.source,
        ),
        evidence={
            "given_share": 1.0 / scale,
            "loss_scale": scale,
            "unscaled_loss_share": found.steps / max(found.of, 1),
            "limit": share,
            "steps": found.steps,
            "confidence_reason": "the tensors were the same object",
        },
        prescriptions=(
            Prescription(
                title=f"call backward on what `scaler.scale` returns{line}: gradients x {scale:g}",
                change={"backward": {"from": "loss", "to": "scaler.scale(loss)"}},
                predicted={"given_share": {"from": 1.0 / scale, "to": 1.0}},
                snippet="scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n",
            ),
        ),
    )
