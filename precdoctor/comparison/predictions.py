"""Whether the predictions of a prescription came true: each effect as promised, and as the changed run measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.prescriptions.effects import Effect
from precdoctor.diagnosis.prescriptions.file import parse
from precdoctor.diagnosis.prescriptions.measures import steps_in
from precdoctor.diagnosis.prescriptions.prescribed import Prescribed
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError

#: A prediction came true when it is off by at most this share of what was measured, or by :data:`POINTS` in a share.
RELATIVE = 0.20
#: Half a percentage point, also of steps among all steps.
POINTS = 0.005


@dataclass(frozen=True)
class Outcome:
    """One predicted effect held against the run that has the change.

    Attributes:
        code, title: of the prescription.
        effect: as predicted from the run before.
        before: as the first of the two runs compared has it; None where it does not.
        measured: as the changed run has it; None where it does not.
        steps: the changed run's steps.
        came_true: None where nothing was measured.
    """

    code: str
    title: str
    effect: Effect
    before: float | None
    measured: float | None
    steps: int
    came_true: bool | None

    @property
    def went_further(self) -> bool:
        """Not as predicted, but beyond it, in its direction."""
        if self.came_true is not False or self.measured is None:
            return False
        return (self.effect.after - self.effect.before) * (self.measured - self.effect.after) > 0.0


@dataclass(frozen=True)
class Applied:
    """What was applied to the second run.

    Attributes:
        prescriptions: with their changes and effects.
        done: per change (its ``where`` and setting in words) what the recorder says of it.
        outcomes: the effects, predicted and measured.
        problem: why the run's own account of it cannot be read; "" when it can.
    """

    prescriptions: tuple[Prescribed, ...]
    done: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    problem: str = ""


def applied_to(before: RunView, after: RunView) -> Applied | None:
    """What ``record --apply`` did to a run, and whether it helped as predicted; None for a run without."""
    statement = after.run.info.get("applied")
    if statement is None:
        return None
    try:
        prescriptions = _read(statement)
    except UsageError as error:  # a run directory is data, and may say anything
        return Applied((), (), (), str(error))
    outcomes = [_outcome(p, e, before, after) for p in prescriptions for e in p.effects]
    return Applied(tuple(prescriptions), tuple(_done(after)), tuple(outcomes))


def _read(statement: object) -> list[Prescribed]:
    if not isinstance(statement, Mapping):
        raise UsageError("run.json: applied is not a table")
    document = {"schema_version": statement.get("schema_version"), "prescription": statement.get("prescriptions")}
    return parse(document, "run.json")


def _done(after: RunView) -> Sequence[str]:
    """The ``applied`` events in words, each once."""
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
        title=prescription.title,
        effect=effect,
        before=effect.measure.take(before, effect.scope),
        measured=measured,
        steps=steps,
        came_true=None if measured is None else came_true(effect, measured, steps),
    )


def came_true(effect: Effect, measured: float, steps: int) -> bool:
    """Within :data:`RELATIVE` or, for shares and counts of steps, within :data:`POINTS`.

    Args:
        effect: as predicted.
        measured: in the changed run.
        steps: of the changed run; counts are compared as shares of the steps of their own run.
    """
    predicted = effect.after
    if effect.measure.unit == "steps":
        predicted, measured = predicted / max(1, effect.steps or steps), measured / max(1, steps)
    off = abs(predicted - measured)
    if off <= RELATIVE * abs(measured):
        return True
    return effect.measure.unit in ("share", "steps") and off <= POINTS + 1e-12
