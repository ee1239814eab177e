"""PD404, causes ``stale`` and ``held-down``: scales that follow the amax of earlier steps, as in delayed scaling.

A stale scale is too large because amax has jumped past it. A scale is held down if the history is so long that one old
spike keeps it small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Cast, Casts, Operand
from precdoctor.diagnosis.families.fp8.fp8_damage import damage
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import listed
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import (
    ScaleEffect,
    every_step,
    first_accepted,
    lags,
    longer,
    moves,
    recipe_of,
    recorded_effect,
    shorter,
    snippet,
    words,
)
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.fp8_scaling import DelayedScaling

#: Range of the spike's amax times the scale in force, over the format's maximum, in which the spike explains the scale:
#: room for margins of two binades and for scales rounded to powers of two.
_EXPLAINED = (2.0**-3.1, 1.05)
#: Least number of held-down steps; chosen empirically.
_FEWEST = 4
#: Number of held-down casts whose cost is predicted, to bound the time; the scale must do harm on most of them.
_PREDICTED = 8


@dataclass(frozen=True, eq=False)
class _Stale:
    """An operand whose scale lags behind amax, with the effect of its recorded scales."""

    operand: Operand
    effect: ScaleEffect

    @property
    def share(self) -> float:
        """Stale steps among the settled ones."""
        return len(self.effect.stale) / self.effect.steps

    @property
    def lasting(self) -> float:
        """Stale steps among the newer half of the settled ones."""
        newer = self.operand.settled.step[len(self.operand.settled) // 2 :]
        return float(np.isin(newer, self.effect.stale).mean())


def stale(rule: Rule, view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the operand that is stale most often."""
    moving = [o for o in found.values() if lags(o) and o.numel >= options["min_elements"]]
    if not moving:
        return Checked((), "no scale follows from the amax of earlier steps")
    lagging = [_Stale(o, recorded_effect(o, options)) for o in moving]
    limit, fewest = options["stale_share"], options["min_stale"]
    guilty = [s for s in lagging if min(s.share, s.lasting) >= limit and len(s.effect.stale) >= fewest]
    if not guilty:
        worst = max(s.share for s in lagging)
        return Checked((), f"{len(moving)} with delayed scaling, stale on at most {percent(worst)} of the steps")
    guilty.sort(key=lambda s: (-s.share, s.operand.key))
    return Checked(
        [_stale_finding(rule, view, guilty, options)], f"the scales of {plural(len(guilty), 'operand')} are stale"
    )


def _stale_finding(rule: Rule, view: RunView, guilty: Sequence[_Stale], options: Options) -> Finding:
    worst = guilty[0]
    operand, effect = worst.operand, worst.effect
    casts = operand.settled[np.isin(operand.settled.step, effect.stale)]
    cast = casts[int(casts.peak.argmax())]
    present = recipe_of(operand)
    binades = -operand.fmt.headroom(cast.peak)
    if present is not None:
        sure, why, how = 0.9, "the scales in the log are those of the recipe", words(present)
    elif every_step(operand):
        sure, why, how = 0.8, "the scale lags behind amax", "the amax of earlier steps"
    else:
        sure, why, how = 0.6, "steps lie between the recorded ones", "the amax of earlier steps"
    return rule.finding(
        severity=Severity.ERROR if worst.share >= options["error_share"] else Severity.WARNING,
        confidence=sure,
        cause="stale",
        title=f"the FP8 scale of the {operand.label} is stale on {percent(worst.share)} of the steps",
        message=f"The scale of the {operand.label} ({operand.fmt.dtype}) follows from {how}. On {len(effect.stale)} of "
        f"{plural(effect.steps, 'step')} (limit {percent(options['stale_share'])}) amax had jumped past it and "
        f"clipping cost more than {options['stale_db']:g} dB. At step {cast.step} amax {cast.amax or 0.0:.3g} times "
        f"the scale {cast.scale or 0.0:.3g} was {binades:.1f} binades above {operand.fmt.max:g}, and "
        f"{percent(cast.saturated_share)} of the elements were clipped. Affected: {plural(len(guilty), 'operand')}.",
        location=operand.location(cast),
        evidence={
            "stale_share": worst.share,
            "limit": options["stale_share"],
            "stale_steps": list(effect.stale[:64]),
            "steps_examined": effect.steps,
            "binades": binades,
            "scale": cast.scale,
            "amax": cast.amax,
            "recipe": None if present is None else str(present),
            "history": operand.history(operand.casts[operand.casts.amax > 0.0]),
            "tensors": listed((s.operand for s in guilty), "saturated_share"),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=_prescribe_longer(operand, present, effect, options),
    )


def _prescribe_longer(
    operand: Operand, present: DelayedScaling | None, effect: ScaleEffect, options: Options
) -> Prescription:
    """Prescribe the smallest change with few stale steps that flushes no more than the limit, or than now."""
    span = int(operand.casts.step[-1] - operand.casts.step[0]) + 1
    room = max(options["flushed_share"], effect.flushed)

    def accept(other: ScaleEffect) -> bool:
        return len(other.stale) < options["stale_share"] * other.steps and other.flushed <= room

    recipe, better = first_accepted(operand, longer(present, span), accept, options)
    return Prescription(
        title=f"scale by {words(recipe)}: stale steps {len(effect.stale)} -> {len(better.stale)}, flushed "
        f"{percent(effect.flushed)} -> {percent(better.flushed)}",
        change={
            "operand": operand.label,
            "fp8_recipe": {"from": None if present is None else str(present), "to": str(recipe)},
        },
        predicted={
            "stale_steps": {"from": len(effect.stale), "to": len(better.stale)},
            "largest_saturated_share": {"from": effect.clipped, "to": better.clipped},
            "flushed_share": {"from": effect.flushed, "to": better.flushed},
        },
        snippet=snippet(recipe, operand.fmt),
    )


# -- held down --------------------------------------------------------------------------------------------------------


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
    return Checked([_held_finding(rule, view, guilty, options)], f"a spike holds {plural(len(guilty), 'scale')} down")


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
    if not damage(cast.statistics, fmt).is_harmful(fmt, options["lost_db"]):
        return False
    own = damage(cast.statistics, fmt, fmt.max / cast.peak)
    return own.flushed < options["flushed_share"] or not own.is_harmful(fmt, options["lost_db"])


def _held_finding(rule: Rule, view: RunView, guilty: Sequence[_Held], options: Options) -> Finding:
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
        location=operand.location(cast),
        evidence={
            "held_share": worst.share,
            "limit": options["held_share"],
            "held_steps": worst.casts.step[:64].tolist(),
            "spike_step": spike.step,
            "spike_amax": spike.amax,
            "wasted_binades": wasted,
            "flushed_share": worst.flushed,
            "steps_examined": len(operand.settled),
            "tensors": listed((h.operand for h in guilty), "flushed_share"),
            **operand.evidence(view, cast),
            "confidence_reason": "spike, scale and flushed elements are recorded"
            + ("" if whole else ", but not every step"),
        },
        prescription=_prescribe_shorter(worst, options),
    )


def _prescribe_shorter(held: _Held, options: Options) -> Prescription:
    """Prescribe the longest history that flushes on less than half the limit of steps and is stale no more often."""
    operand = held.operand
    now = recorded_effect(operand, options)

    def accept(effect: ScaleEffect) -> bool:
        quiet = len(effect.flushing) < 0.5 * options["held_share"] * effect.steps
        return quiet and len(effect.stale) <= len(now.stale)

    recipe, better = first_accepted(operand, shorter(held.longest), accept, options)
    return Prescription(
        title=f"scale by {words(recipe)}: steps above the limit {len(held.casts)} -> {len(better.flushing)}, "
        f"stale steps {len(better.stale)}",
        change={"operand": operand.label, "fp8_recipe": {"from": None, "to": str(recipe)}},
        predicted={
            "flushing_steps": {"from": len(held.casts), "to": len(better.flushing)},
            "flushed_share": {"from": held.flushed, "to": better.flushed},
            "stale_steps": {"to": len(better.stale)},
        },
        snippet=snippet(recipe, operand.fmt),
    )
