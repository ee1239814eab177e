"""A gradient norm that went up and did not come down: where, by how much, and what holds it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.advice.stable_rate import StableRate
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.divergence.onset import clip_level, course_left
from precdoctor.diagnosis.survey.histories import after_an_ordinary_update
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process

#: Steps before that make the baseline, and after that show whether it stays.
WINDOW, AFTER = 32, 5
#: Share of the rise that may be left where an explosion is called past.
_GONE = 0.25


@dataclass(frozen=True)
class Explosion:
    """The first jump of a gradient norm that stays, or the rise of a whole run."""

    process: Process
    steps: Sequence[StepFacts]
    at: int
    baseline: float
    peak: float
    loss: tuple[float, float] | None
    #: Without a jump from a level it had: the whole run went up.
    diverged: bool = False
    #: That, and the loss fell without end instead of rising.
    unbounded: bool = False
    #: One step, and as good as no gradients after it.
    fatal: bool = False

    @property
    def first(self) -> StepFacts:
        """The step at which it is seen."""
        return self.steps[self.at]

    @property
    def left(self) -> int:
        """Index of the step that threw the run off: the one at which it is seen, or one before it."""
        return course_left(self.steps, self.at)

    @property
    def sudden(self) -> bool:
        """The loss jumped in the very step in which the norm did, and the update before cannot have caused it."""
        if self.loss is None or self.first.loss is None or self.diverged or self.fatal:
            return False
        at_once = self.first.loss - self.loss[0] >= 0.5 * (self.loss[1] - self.loss[0])
        return at_once and after_an_ordinary_update(self.steps, self.at)

    @property
    def passed(self) -> bool:
        """The run got over it by itself: by its last steps, most of the rise of norm and loss is gone."""
        tail = self.steps[self.at :][-max(AFTER, (len(self.steps) - self.at) // 4) :]
        losses = [s.loss for s in tail if s.loss is not None]
        if self.diverged or self.fatal or self.loss is None or not losses or len(self.steps) - self.at < 4 * AFTER:
            return False
        norm, loss = median(s.grad_norm or 0.0 for s in tail), median(losses)
        return _left(self.baseline, self.peak, norm) < _GONE and _left(*self.loss, loss) < _GONE

    @property
    def raised(self) -> tuple[float, float] | None:
        """The usual learning rate before and the one in force, where it has just been at least doubled."""
        rates = [s.lr for s in self.steps[max(0, self.at - WINDOW) : self.at + 1] if s.lr]
        if len(rates) < 2 * AFTER:
            return None
        usual, present = median(rates[:-AFTER]), max(rates[-AFTER:])
        return (usual, present) if present >= 2.0 * usual else None

    @property
    def way_up(self) -> Sequence[StepFacts]:
        """Its steps from the first one to the largest norm."""
        norms = [s.grad_norm or 0.0 for s in self.steps]
        return self.steps[: norms.index(max(norms)) + 1]


def _left(before: float, peak: float, now: float) -> float:
    return (now - before) / max(peak - before, 1e-30)


def cures(explosion: Explosion, module: str, rate: StableRate | None) -> tuple[Prescription, ...]:
    """What to change, the cause before the symptom.

    Args:
        explosion: of the gradient.
        module: whose gradient grew most; empty where it is not known.
        rate: at which the run would not have diverged, where that is what it did.
    """
    if explosion.unbounded:
        return (_hold(explosion, module),)
    clip = _prescribe(explosion)  # holds a run down whose rate is too high, and does not mend it
    return (clip,) if rate is None else (rate.prescription, clip)


def _prescribe(explosion: Explosion) -> Prescription:
    raised = explosion.raised
    if raised is not None:
        usual, present = raised
        return Prescription(
            title=f"learning rate back to {usual:.3g}, at which the norm was {explosion.baseline:.3g}, or warm it up: "
            f"{present:.3g} -> {usual:.3g}",
            change={"lr": {"from": present, "to": usual}},
            predicted={"grad_norm": {"from": explosion.peak, "to": explosion.baseline}},
            snippet=f"for group in optimizer.param_groups:\n    group['lr'] = {usual!r}\n",
        )
    norms = [s.grad_norm for s in explosion.steps[: explosion.left] if s.grad_norm is not None]
    clip = clip_level(norms)
    touched = sum(n > clip for n in norms) / max(1, len(norms))
    healthy = (
        f"{percent(touched)} of the steps before touched" if norms else "the usual choice; no norm before is healthy"
    )
    return Prescription(
        title=f"clip the norm at {clip:.2g}: largest step {explosion.peak:.3g} -> {clip:.2g}, {healthy}",
        change={"clip_norm": {"from": explosion.first.clip_norm, "to": clip}},
        predicted={"largest_norm": {"from": explosion.peak, "to": clip}, "healthy_steps_clipped_share": touched},
        snippet=snippets.clip_norm(clip),
    )


def _hold(explosion: Explosion, module: str) -> Prescription:
    return Prescription(
        title=f"normalise the weights' spectra, or penalise the gradient: its norm {explosion.peak:.3g} -> about "
        f"{explosion.baseline:.2g}, what it was at first",
        change={"parametrization": {"from": None, "to": "spectral_norm"}},
        predicted={"largest_norm": {"from": explosion.peak, "to": explosion.baseline}},
        snippet=snippets.spectral_norm(module),
    )
