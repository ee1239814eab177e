"""PD404, cause ``invalid-amax``: a scale made of an amax that was zero or not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import KIND, Cast, Casts, Operand
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import listed
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import snippet
from precdoctor.diagnosis.survey.frames import Mask
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.fp8_scaling import DelayedScaling


@dataclass(frozen=True, eq=False)
class _Invalid:
    """An operand with an invalid scale on some casts."""

    operand: Operand
    #: The casts with an invalid scale.
    casts: Casts

    @property
    def harm(self) -> tuple[int, float]:
        """Number of casts with non-finite results, and share of the casts with an invalid scale."""
        return int((self.casts.non_finite > 0).sum()), len(self.casts) / len(self.operand.casts)


def invalid_amax(rule: Rule, view: RunView, found: Mapping[Key, Operand], options: Options) -> Checked:
    """Report the operand whose scale did most harm."""
    guilty = [b for o in found.values() if (b := _invalid(view, o, options["absurd"])).casts]
    if not guilty:
        known = sum(int((~np.isnan(o.casts.scale)).sum()) for o in found.values())
        return Checked((), f"{plural(known, 'scale')}, all finite, positive and of a plausible size")
    guilty.sort(key=lambda b: (-b.harm[0], -b.harm[1], b.operand.key))
    return Checked([_finding(rule, view, guilty, options)], f"{plural(len(guilty), 'operand')} with an invalid scale")


def _invalid(view: RunView, operand: Operand, absurd: float) -> _Invalid:
    """Return the operand with its casts of invalid scale, without those whose input was already non-finite."""
    bad = operand.casts[_has_invalid_scale(operand, absurd)]
    return _Invalid(operand, bad[[i for i, cast in enumerate(bad) if not _input_was_bad(view, operand, cast)]])


def _has_invalid_scale(operand: Operand, absurd: float) -> Mask:
    """Return which casts have a scale that is infinite, zero, negative or NaN, or absurdly large for their operand."""
    casts = operand.casts
    unknown = np.isnan(casts.scale)  # or NaN: in the log both are null
    scales = casts.scale[~unknown & casts.scale_is_sound & (casts.alive > 0)]
    usual = np.median(scales) if scales.size else math.nan
    nothing = np.append(True, ((casts.alive == 0) | (casts.non_finite > 0))[:-1])  # no usable amax in the step before
    huge = (casts.peak >= 2.0**absurd * operand.fmt.max) & (nothing | (casts.scale >= 2.0**absurd * usual))
    lost = bool(scales.size) & (casts.non_finite == casts.numel) & (casts.numel > 0)
    return ~casts.scale_is_sound | np.where(unknown, lost, huge)


def _input_was_bad(view: RunView, operand: Operand, cast: Cast) -> bool:
    """Return whether an earlier tensor of the same step was already non-finite, so that no scale is to blame."""
    if not cast.non_finite:
        return False
    rows = view.rows(cast.process, cast.step)
    mine = next((r.order for r in rows if r.key == operand.key and r.order is not None), None)
    if mine is None:
        return False
    return any(
        r.bad and not r.mask_like and r.kind != KIND and r.position < mine
        for r in rows
        if r.kind not in ("weight", "update")
    )


def _reason(operand: Operand, cast: Cast) -> tuple[str, bool]:
    """Return the origin of the scale in words, and whether the log shows it."""
    earlier = operand.casts[operand.casts.step < cast.step]
    if cast.scale is not None and math.isinf(cast.scale) and cast.non_finite == cast.numel:
        return f"amax was 0 at step {cast.step} itself, or at the step before", True
    if not earlier:
        return "the history was empty", False
    last, sound = earlier[-1], bool(earlier.scale_is_sound[-1])
    if sound and last.non_finite:
        return f"amax was not finite at step {last.step}", True
    if sound and not last.alive:
        return f"amax was 0 at step {last.step}", True
    kind = "zero" if cast.scale is None or cast.scale > 1.0 else "infinite"
    return f"an amax before it must have been {kind}", False


def _finding(rule: Rule, view: RunView, guilty: Sequence[_Invalid], options: Options) -> Finding:
    worst = guilty[0]
    operand, cast = worst.operand, worst.casts[0]
    reason, shown = _reason(operand, cast)
    lasting = len(worst.casts) > options["recovers_in"] or bool(worst.casts.non_finite.any())
    limits = f"limit: finite, above 0, and less than {options['absurd']:g} binades over the maximum"
    scale = "NaN" if cast.scale is None else f"{cast.scale:.3g}"
    return rule.finding(
        severity=Severity.ERROR if lasting else Severity.WARNING,
        confidence=0.95 if shown else 0.8,
        cause="invalid-amax",
        title=f"the FP8 scale of the {operand.label} is {scale} at step {cast.step}: {reason}",
        message=f"At step {cast.step} the {operand.label} was cast to {operand.fmt.dtype} with the scale {scale} "
        f"({limits}): {reason}. {_effect(cast)} {plural(len(worst.casts), 'step')} of {len(operand.casts)} had such a "
        f"scale. Affected: {plural(len(guilty), 'operand')}.",
        location=operand.location(cast),
        evidence={
            "scale": cast.scale if cast.scale is not None else math.nan,
            "limit": options["absurd"],
            "bad_steps": worst.casts.step[:64].tolist(),
            "last_bad_step": int(worst.casts.step[-1]),
            "non_finite": cast.non_finite,
            "numel": cast.numel,
            "reason": reason,
            "steps_examined": len(operand.casts),
            "tensors": listed((b.operand for b in guilty), "saturated_share"),
            **operand.evidence(view, cast),
            "confidence_reason": "the amax behind the scale is recorded" if shown else "the scale is recorded",
        },
        prescription=_prescribe(worst, cast),
    )


def _effect(cast: Cast) -> str:
    """State what the scale did to the elements."""
    if cast.non_finite:
        return f"{cast.non_finite:,} of {cast.numel:,} elements became NaN or infinite."
    if not cast.alive:
        return f"All {cast.numel:,} elements became zero."
    return f"{percent(cast.saturated_share)} of the elements were clipped to the maximum."


def _prescribe(worst: _Invalid, cast: Cast) -> Prescription:
    """Prescribe to keep the previous scale; predict the share that the operand's sound scales clip."""
    operand = worst.operand
    sized = operand.casts[(operand.casts.amax > 0.0) & ~np.isin(operand.casts.step, worst.casts.step)]
    before = sized.scale[sized.step < cast.step]
    kept = float(before[-1]) if before.size else 1.0
    clipped = float(np.median(sized.saturated_share)) if sized else 0.0
    return Prescription(
        title=f"leave zero and non-finite amax out and keep the previous scale, {kept:.3g}: invalid scales "
        f"{len(worst.casts)} -> 0",
        change={"operand": operand.label, "scale": {"from": cast.scale, "to": kept}},
        predicted={
            "bad_scale_steps": {"from": len(worst.casts), "to": 0},
            "saturated_share": {"from": cast.saturated_share, "to": clipped},
        },
        snippet=snippet(DelayedScaling(16), operand.fmt),
    )
