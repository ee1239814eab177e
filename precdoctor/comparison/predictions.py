"""Checks the predictions of applied prescriptions: each predicted effect against its value in the changed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.prescriptions.effects import Effect
from precdoctor.diagnosis.prescriptions.file import parse
from precdoctor.diagnosis.prescriptions.measures import steps_in
from precdoctor.diagnosis.prescriptions.prescribed import Prescribed
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError

#: A prediction came true if its error is at most this share of the measured value, or :data:`POINTS` for a share.
RELATIVE = 0.20
#: Half a percentage point; also for counts of steps, as shares of all steps.
POINTS = 0.005


@dataclass(frozen=True)
class Outcome:
    """One predicted effect and its measured value in the changed run.

    Attributes:
        code: of the prescription.
        effect: the effect as predicted from the diagnosed run.
        before: value in the first of the two compared runs; None if it cannot be measured there.
        measured: value in the changed run; None if it cannot be measured there.
        steps: number of steps of the changed run.
        came_true: None if nothing was measured.
    """

    code: str
    effect: Effect
    before: float | None
    measured: float | None
    steps: int
    came_true: bool | None

    @property
    def went_further(self) -> bool:
        """Whether the prediction failed because the effect was larger than predicted, in the predicted direction."""
        if self.came_true is not False or self.measured is None:
            return False
        return (self.effect.after - self.effect.before) * (self.measured - self.effect.after) > 0.0


@dataclass(frozen=True)
class Applied:
    """The prescriptions that were applied to the second run.

    Attributes:
        prescriptions: with their changes and effects.
        done: for each change one line: that it was made, or why it was not.
        outcomes: the effects, predicted and measured.
        problem: why run.json's statement of the prescriptions cannot be read; "" if it can.
    """

    prescriptions: tuple[Prescribed, ...]
    done: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    problem: str = ""


def applied_to(before: RunView, after: RunView) -> Applied | None:
    """The prescriptions applied to run ``after`` and their outcomes; None if it was recorded without ``--apply``."""
    statement = after.run.info.get("applied")
    if statement is None:
        return None
    try:
        prescriptions = _read(statement)
    except UsageError as error:  # run.json is untrusted
        return Applied((), (), (), str(error))
    outcomes = [_outcome(p, e, before, after) for p in prescriptions for e in p.effects]
    return Applied(tuple(prescriptions), tuple(_applied_lines(after)), tuple(outcomes))


def _read(statement: object) -> list[Prescribed]:
    if not isinstance(statement, Mapping):
        raise UsageError("run.json: applied is not a table")
    document = {"schema_version": statement.get("schema_version"), "prescription": statement.get("prescriptions")}
    return parse(document, "run.json")


def _applied_lines(after: RunView) -> Sequence[str]:
    """The ``applied`` events in words, without duplicates."""
    lines = []
    for event in after.events_of("applied"):
        data = event["data"]
        where = data.get("what") or event.get("module") or ""
        if data.get("done"):
            before = "" if data.get("was") is None else f"{data['was']} -> "
            lines.append(f"{data.get('setting')} {before}{data.get('to')} ({where})")
        else:
            lines.append(f"not applied: {data.get('setting')} {data.get('to')}, because {data.get('why')}")
    return tuple(dict.fromkeys(lines))


def _outcome(prescription: Prescribed, effect: Effect, before: RunView, after: RunView) -> Outcome:
    measured = effect.measure.take(after, effect.scope)
    steps = steps_in(after)
    return Outcome(
        code=prescription.code,
        effect=effect,
        before=effect.measure.take(before, effect.scope),
        measured=measured,
        steps=steps,
        came_true=None if measured is None else came_true(effect, measured, steps),
    )


def came_true(effect: Effect, measured: float, steps: int) -> bool:
    """Return whether a prediction is within :data:`RELATIVE` or, for shares and counts of steps, :data:`POINTS`.

    Counts of steps are compared as shares of the steps of their own run; the changed run has ``steps``.
    """
    predicted = effect.after
    if effect.measure.unit == "steps":
        predicted, measured = predicted / max(1, effect.steps or steps), measured / max(1, steps)
    off = abs(predicted - measured)
    if off <= RELATIVE * abs(measured):
        return True
    return effect.measure.unit in ("share", "steps") and off <= POINTS + 1e-12
