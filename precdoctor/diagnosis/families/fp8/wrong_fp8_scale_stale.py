"""PD404, cause ``stale``: the scale follows the amax of earlier steps, and amax has jumped past it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import history, listed, location
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import (
    ScaleEffect,
    every_step,
    first_accepted,
    lags,
    longer,
    recipe_of,
    recorded_effect,
    snippet,
    words,
)
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.fp8_scaling import DelayedScaling


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
    lagging = [_Stale(o, recorded_effect(o, options["stale_db"], options["flushed_share"])) for o in moving]
    limit, fewest = options["stale_share"], options["min_stale"]
    guilty = [s for s in lagging if min(s.share, s.lasting) >= limit and len(s.effect.stale) >= fewest]
    if not guilty:
        worst = max(s.share for s in lagging)
        return Checked((), f"{len(moving)} with delayed scaling, stale on at most {percent(worst)} of the steps")
    guilty.sort(key=lambda s: (-s.share, s.operand.key))
    return Checked([_finding(rule, view, guilty, options)], f"the scales of {plural(len(guilty), 'operand')} are stale")


def _finding(rule: Rule, view: RunView, guilty: Sequence[_Stale], options: Options) -> Finding:
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
        location=location(operand, cast),
        evidence={
            "stale_share": worst.share,
            "limit": options["stale_share"],
            "stale_steps": list(effect.stale[:64]),
            "steps_examined": effect.steps,
            "binades": binades,
            "scale": cast.scale,
            "amax": cast.amax,
            "recipe": None if present is None else str(present),
            "history": history(operand, operand.casts[operand.casts.amax > 0.0]),
            "tensors": listed((s.operand for s in guilty), lambda o: {"saturated_share": o.saturated_share}),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=_prescribe(operand, present, effect, options),
    )


def _prescribe(operand: Operand, present: DelayedScaling | None, effect: ScaleEffect, options: Options) -> Prescription:
    """Prescribe the smallest change with few stale steps that flushes no more than the limit, or than now."""
    span = int(operand.casts.step[-1] - operand.casts.step[0]) + 1
    room = max(options["flushed_share"], effect.flushed)

    def accept(other: ScaleEffect) -> bool:
        return len(other.stale) < options["stale_share"] * other.steps and other.flushed <= room

    limits = options["stale_db"], options["flushed_share"]
    recipe, better = first_accepted(operand, longer(present, span), accept, *limits)
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
        snippet=snippet(recipe, operand.fmt.max, operand.fmt.dtype),
    )
