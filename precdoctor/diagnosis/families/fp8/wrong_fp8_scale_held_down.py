"""PD404, cause ``held-down``: delayed scaling whose history is so long that one old spike keeps the scale small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Prescription
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Cast, Casts, Operand
from precdoctor.diagnosis.families.fp8.fp8_damage import damage
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import harmful, listed, location
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import (
    ScaleEffect,
    every_step,
    first_accepted,
    moves,
    recorded_effect,
    shorter,
    snippet,
    words,
)
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView

#: Range of the spike's amax times the scale in force, over the format's maximum, in which the spike explains the scale:
#: room for margins of two binades and for scales rounded to powers of two.
_EXPLAINED = (2.0**-3.1, 1.05)
#: Least number of held-down steps; chosen empirically.
_FEWEST = 4
#: Number of held-down casts whose cost is predicted, to bound the time; the scale must do harm on most of them.
_PREDICTED = 8


@dataclass(frozen=True, eq=False)
class _Held:
    """An operand whose scale is held down by spikes."""

    operand: Operand
    #: Held-down casts, and, for each, the cast with the spike.
    casts: Casts
    spikes: Casts

    @property
    def share(self) -> float:
        """Held-down share of the settled casts."""
        return len(self.casts) / len(self.operand.settled)

    @property
    def longest(self) -> int:
        """Largest distance in steps from a spike to a cast that it holds down."""
        return int((self.casts.step - self.spikes.step).max())

    @property
    def flushed(self) -> float:
        """Median flushed share of the held-down casts."""
        return float(np.median(self.casts.flushed_share))


def held_down(rule: Rule, view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the operand that is held down most often."""
    moving = [o for o in found.values() if moves(o) and o.numel >= options["min_elements"]]
    if not moving:
        return Checked((), "no scale follows from amax")
    held = [_held(o, options) for o in moving]
    guilty = [h for h in held if h.share >= options["held_share"] and len(h.casts) >= _FEWEST]
    if not guilty:
        return Checked((), f"{len(moving)} with a scale that moves, none held down by a spike to any harm")
    guilty.sort(key=lambda h: (-h.share, h.operand.key))
    return Checked([_finding(rule, view, guilty, options)], f"a spike holds {plural(len(guilty), 'scale')} down")


def _held(operand: Operand, options: Options) -> _Held:
    """Return the operand with the casts that flush too much at the scale of an old spike; without any if harmless."""
    casts = operand.scaled[operand.scaled.flushed_share >= options["flushed_share"]]
    sized = operand.casts[operand.casts.amax > 0.0]
    # per cast, the newest earlier one whose amax explains the scale in force; a spike if that amax was much larger
    fitted = sized.amax * casts.scale[:, None] / operand.fmt.max
    explains = (sized.step < casts.step[:, None]) & (fitted >= _EXPLAINED[0]) & (fitted <= _EXPLAINED[1])
    newest = np.where(explains, np.arange(len(sized)), -1).max(axis=1, initial=-1)
    held = (newest >= 0) & (np.append(sized.amax, 0.0)[newest] >= 2.0 ** options["spike"] * casts.amax)
    casts, spikes = casts[held], sized[newest[held]]
    tried = [_is_harmful(cast, operand, options) for cast in casts[:: max(1, len(casts) // _PREDICTED)]]
    return _Held(operand, casts, spikes) if 2 * sum(tried) > len(tried) else _Held(operand, casts[:0], spikes[:0])


def _is_harmful(cast: Cast, operand: Operand, options: Options) -> bool:
    """Return whether the scale in force does harm and that of the tensor's own amax would not."""
    fmt = operand.fmt
    if not harmful(damage(cast.statistics, fmt), fmt, options["lost_db"]):
        return False
    own = damage(cast.statistics, fmt, fmt.max / cast.peak)
    return own.flushed < options["flushed_share"] or not harmful(own, fmt, options["lost_db"])


def _finding(rule: Rule, view: RunView, guilty: Sequence[_Held], options: Options) -> Finding:
    worst = guilty[0]
    operand = worst.operand
    at = int(worst.casts.flushed_share.argmax())
    cast, spike = worst.casts[at], worst.spikes[at]
    wasted = operand.fmt.headroom(cast.peak)
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
            "held_steps": worst.casts.step[:64].tolist(),
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
        prescription=_prescribe(worst, options),
    )


def _prescribe(held: _Held, options: Options) -> Prescription:
    """Prescribe the longest history that flushes on less than half the limit of steps and is stale no more often."""
    operand, limits = held.operand, (options["stale_db"], options["flushed_share"])
    now = recorded_effect(operand, *limits)

    def accept(effect: ScaleEffect) -> bool:
        quiet = len(effect.flushing) < 0.5 * options["held_share"] * effect.steps
        return quiet and len(effect.stale) <= len(now.stale)

    recipe, better = first_accepted(operand, shorter(held.longest), accept, *limits)
    return Prescription(
        title=f"scale by {words(recipe)}: steps above the limit {len(held.casts)} -> {len(better.flushing)}, "
        f"stale steps {len(better.stale)}",
        change={"operand": operand.label, "fp8_recipe": {"from": None, "to": str(recipe)}},
        predicted={
            "flushing_steps": {"from": len(held.casts), "to": len(better.flushing)},
            "flushed_share": {"from": held.flushed, "to": better.flushed},
            "stale_steps": {"to": len(better.stale)},
        },
        snippet=snippet(recipe, operand.fmt.max, operand.fmt.dtype),
    )
