"""PD404, cause ``held-down``: delayed scaling whose history is so long that one old spike keeps the scale small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Prescription
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Cast, Operand, damage
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import harmful, listed, location
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import (
    Course,
    every_step,
    first_that,
    moves,
    recorded,
    shorter,
    snippet,
    words,
)
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView

#: Amax of the spike times the scale in force, over the maximum: room for margins of two binades and rounded scales.
_EXPLAINED = (2.0**-3.1, 1.05)
#: Least number of held-down steps; chosen empirically.
_FEWEST = 4
#: Number of casts whose cost is predicted, to bound the time; most of them must be above the limits.
_PREDICTED = 8


@dataclass(frozen=True, eq=False)
class _Held:
    operand: Operand
    #: Held-down casts, each with the cast of its spike.
    casts: tuple[tuple[Cast, Cast], ...]

    @property
    def share(self) -> float:
        return len(self.casts) / len(self.operand.settled)

    @property
    def longest(self) -> int:
        return max(c.step - spike.step for c, spike in self.casts)

    @property
    def flushed(self) -> float:
        return median(c.flushed_share for c, _ in self.casts)


def held_down(rule: Rule, view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the operand that is held down most often."""
    moving = [o for o in found.values() if moves(o) and o.settled[0].numel >= options["min_elements"]]
    if not moving:
        return Checked((), "no scale follows from amax")
    held = [_held(o, options) for o in moving]
    guilty = [h for h in held if h.share >= options["held_share"] and len(h.casts) >= _FEWEST]
    if not guilty:
        return Checked((), f"{len(moving)} with a scale that moves, none held down by a spike to any harm")
    guilty.sort(key=lambda h: (-h.share, h.operand.key))
    return Checked([_finding(rule, view, guilty, options)], f"a spike holds {plural(len(guilty), 'scale')} down")


def _held(operand: Operand, options: Options) -> _Held:
    casts = operand.scaled
    sized = [c for c in operand.casts if c.amax]
    pairs = []
    for cast in casts:
        if cast.flushed_share < options["flushed_share"]:
            continue
        spike = _spike(cast, sized, operand, options["spike"])
        if spike is not None:
            pairs.append((cast, spike))
    tried = [_costs(cast, operand, options) for cast, _ in pairs[:: max(1, len(pairs) // _PREDICTED)]]
    return _Held(operand, tuple(pairs) if 2 * sum(tried) > len(tried) else ())


def _spike(cast: Cast, sized: Sequence[Cast], operand: Operand, binades: float) -> Cast | None:
    """The newest earlier cast that the scale in force fits, if its amax was so much larger."""
    low, high = _EXPLAINED
    for other in reversed(sized):
        product = (other.amax or 0.0) * (cast.scale or 0.0) / operand.fmt.max
        if other.step < cast.step and low <= product <= high:
            return other if (other.amax or 0.0) >= 2.0**binades * (cast.amax or 0.0) else None
    return None


def _costs(cast: Cast, operand: Operand, options: Options) -> bool:
    """Whether the scale in force does harm and that of the tensor's own amax would not."""
    fmt = operand.fmt
    if not harmful(damage(cast.statistics, fmt), fmt, options["lost_db"]):
        return False
    own = damage(cast.statistics, fmt, fmt.max / cast.peak)
    return own.flushed < options["flushed_share"] or not harmful(own, fmt, options["lost_db"])


def _finding(rule: Rule, view: RunView, guilty: Sequence[_Held], options: Options) -> Finding:
    worst = guilty[0]
    operand = worst.operand
    cast, spike = max(worst.casts, key=lambda pair: (pair[0].flushed_share, -pair[0].step))
    wasted = operand.fmt.headroom(cast.peak)
    better = _better(worst, options)
    whole = every_step(operand)
    return rule.finding(
        confidence=0.9 if whole else 0.7,
        cause="held-down",
        title=f"a spike of step {spike.step} holds the FP8 scale of the {operand.label} down: "
        f"{percent(worst.flushed)} flushed",
        message=f"At step {spike.step} amax of the {operand.label} was {spike.amax or 0.0:.3g}. Up to "
        f"{plural(worst.longest, 'step')} later the scale was still that of the spike. At step {cast.step} it was "
        f"{cast.scale or 0.0:.3g} and amax {cast.amax or 0.0:.3g}: {wasted:.1f} binades of {operand.fmt.dtype} unused. "
        f"On {len(worst.casts)} of {plural(len(operand.settled), 'step')} ({percent(worst.share)}, limit "
        f"{percent(options['held_share'])}) more than {percent(options['flushed_share'])} was flushed, "
        f"{percent(worst.flushed)} in their median. Affected: {plural(len(guilty), 'operand')}.",
        location=location(operand, cast),
        evidence={
            "held_share": worst.share,
            "limit": options["held_share"],
            "held_steps": [c.step for c, _ in worst.casts][:64],
            "spike_step": spike.step,
            "spike_amax": spike.amax,
            "wasted_binades": wasted,
            "flushed_share": worst.flushed,
            "steps_examined": len(operand.settled),
            "tensors": listed((h.operand for h in guilty), lambda o: {"flushed_share": o.flushed_share}),
            **operand.evidence(view, cast),
            "confidence_reason": "spike, scale and flushed elements are recorded"
            + ("" if whole else ", but not every step"),
        },
        prescriptions=(_prescribe(worst, better),),
    )


def _better(held: _Held, options: Options) -> Course:
    """The longest history that flushes on less than half the limit of steps and is stale no more often than now."""
    now = recorded(held.operand, options["stale_db"], options["flushed_share"])

    def accept(course: Course) -> bool:
        quiet = len(course.flushing) < 0.5 * options["held_share"] * course.steps
        return quiet and len(course.stale) <= len(now.stale)

    return first_that(held.operand, shorter(held.longest), accept, options["stale_db"], options["flushed_share"])


def _prescribe(held: _Held, better: Course) -> Prescription:
    operand = held.operand
    return Prescription(
        title=f"scale by {words(better.recipe)}: steps above the limit {len(held.casts)} -> {len(better.flushing)}, "
        f"stale steps {len(better.stale)}",
        change={"operand": operand.label, "fp8_recipe": {"from": None, "to": str(better.recipe)}},
        predicted={
            "flushing_steps": {"from": len(held.casts), "to": len(better.flushing)},
            "flushed_share": {"from": held.flushed, "to": better.flushed},
            "stale_steps": {"to": len(better.stale)},
        },
        snippet=snippet(better.recipe, operand.fmt.max, operand.fmt.dtype),
    )
