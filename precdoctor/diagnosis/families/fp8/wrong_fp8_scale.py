"""PD404: delayed scaling whose history is too short: the scale is stale whenever amax jumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import same_tensors, when, worst_tensor
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    FLUSHED_SHARE,
    MIN_ELEMENTS,
    listed,
    location,
    seen_words,
)
from precdoctor.diagnosis.families.fp8.fp8_scale_history import (
    Course,
    every_step,
    first_that,
    lags,
    longer,
    recipe_of,
    recorded,
    snippet,
    words,
)
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.fp8_scaling import DelayedScaling

PAGE = RulePage(
    finds="""
Casts to a float8 dtype whose scale follows from earlier steps and is too large on the step it is used: amax has jumped
past what the scale allows, and clipping costs `lost_db` of signal to noise against rounding alone. That must happen on
`stale_share` of the recorded steps: amax of data that do not change exceeds a history of 16 steps on one step in 17
whatever one does, so now and then means nothing; and on that share of their newer half, for weights that begin at zero
outrun any history in their first steps. A scale that never moves is no history (PD401 speaks of it), and the
first recorded step, at which a history is empty, does not count.
""",
    matters="""
E4M3 saturates silently: on those steps the largest activations, or the gradients of the hardest batch, all become
equal. It is the step one would have learnt most from.
""",
    example="""
Every fourth batch is sixteen times as large, and the scale knows the last step only:

    scale = 448.0 / self.amax                 # of the step before
    self.amax = x.abs().amax()
    y = (x * scale).to(torch.float8_e4m3fn)   # one batch in four is clipped by four binades
""",
    remedy="""
A longer history (the largest amax of the last 16 or 1024 steps) costs nothing; a margin of a binade or two helps where
amax grows steadily; the scale of the tensor's own amax is always right and costs a pass over it. The log is replayed
with each, and the smallest change that is enough is prescribed.
""",
    confidence="""
0.9 when the recorded scales are those of a delayed recipe, step by step; 0.8 when they only lag; 0.6 when steps lie
between the recorded ones, so that the history is not known.
""",
    references=(
        "Transformer Engine documentation: DelayedScaling, amax_history_len, margin",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
    ),
)


@dataclass(frozen=True, eq=False)
class _Stale:
    operand: Operand
    course: Course

    @property
    def share(self) -> float:
        return len(self.course.stale) / self.course.steps

    @property
    def lasting(self) -> float:
        """The share of it among the newer half of the steps."""
        newer = {c.step for c in self.operand.settled[len(self.operand.settled) // 2 :]}
        return len(newer & set(self.course.stale)) / len(newer)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the operand that is stale most often."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    moving = [o for o in found.values() if lags(o) and o.settled[0].numel >= options["min_elements"]]
    if not moving:
        return Checked((), f"{seen_words(found)}: no scale that follows from the amax of earlier steps")
    courses = [_Stale(o, recorded(o, options["lost_db"], options["flushed_share"])) for o in moving]
    limit, fewest = options["stale_share"], options["min_stale"]
    guilty = [s for s in courses if min(s.share, s.lasting) >= limit and len(s.course.stale) >= fewest]
    if not guilty:
        worst = max(s.share for s in courses)
        return Checked((), f"{len(moving)} of {seen_words(found)}: stale on {percent(worst)} of the steps in the worst")
    guilty.sort(key=lambda s: (-s.share, s.operand.key))
    return Checked([_finding(view, guilty, options)], f"{plural(len(guilty), 'operand')} of {seen_words(found)}",
                   Status.FAILED)  # fmt: skip


def _finding(view: RunView, guilty: Sequence[_Stale], options: Options) -> Finding:
    worst = guilty[0]
    operand, course = worst.operand, worst.course
    cast = max((c for c in operand.settled if c.step in course.stale), key=lambda c: c.peak)
    present = recipe_of(operand)
    better = _better(operand, present, course, options)
    binades = -operand.fmt.headroom(cast.peak)
    if present is not None:
        sure, why, how = 0.9, "the scales in the log are those of the recipe", words(present)
    elif every_step(operand):
        sure, why, how = 0.8, "the scale lags behind amax", "the amax of earlier steps"
    else:
        sure, why, how = 0.6, "steps lie between the recorded ones", "the amax of earlier steps"
    return Finding(
        code="PD404",
        name="stale-fp8-scale",
        severity=Severity.ERROR if worst.share >= options["error_share"] else Severity.WARNING,
        confidence=sure,
        title=f"the FP8 scale of the {operand.label} is stale on {percent(worst.share)} of the steps",
        message=f"The scale of the {operand.label} ({operand.fmt.dtype}) follows from {how}. On "
        f"{len(course.stale)} of {plural(course.steps, 'step')} (limit {percent(options['stale_share'])}) amax had "
        f"jumped past it and clipping cost more than {options['lost_db']:g} dB; at step {cast.step} amax was "
        f"{cast.amax or 0.0:.3g}, the scale {cast.scale or 0.0:.3g}, their product {binades:.1f} binades above "
        f"{operand.fmt.max:g}, and {percent(cast.saturated_share)} of the elements were clipped. "
        f"{plural(len(guilty), 'operand')} in all.",
        location=location(operand, cast),
        evidence={
            "stale_share": worst.share,
            "limit": options["stale_share"],
            "stale_steps": list(course.stale[:64]),
            "steps_examined": course.steps,
            "binades": binades,
            "scale": cast.scale,
            "amax": cast.amax,
            "recipe": None if present is None else str(present),
            "history": _series(operand),
            "tensors": listed((s.operand for s in guilty), lambda o: {"saturated_share": o.saturated_share}),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescriptions=(_prescribe(operand, present, course, better),),
    )


def _series(operand: Operand, limit: int = 64) -> list[dict[str, Any]]:
    """The fixed-shape ``history``: amax before scaling, headroom after it."""
    casts = [c for c in operand.casts if c.amax]
    kept = casts[:: -max(1, -(-len(casts) // limit))][::-1] if casts else []
    return [{"step": c.step, "amax": c.amax, "headroom_binades": operand.fmt.headroom(c.peak)} for c in kept]


def _better(operand: Operand, present: DelayedScaling | None, course: Course, options: Options) -> Course:
    """The smallest change that is stale on less than the limit and flushes no more than the limit, or than now."""
    span = operand.casts[-1].step - operand.casts[0].step + 1
    room = max(options["flushed_share"], course.flushed)

    def accept(other: Course) -> bool:
        return len(other.stale) < options["stale_share"] * other.steps and other.flushed <= room

    return first_that(operand, longer(present, span), accept, options["lost_db"], options["flushed_share"])


def _prescribe(operand: Operand, present: DelayedScaling | None, course: Course, better: Course) -> Prescription:
    return Prescription(
        title=f"scale by {words(better.recipe)}: stale steps {len(course.stale)} -> {len(better.stale)}, flushed "
        f"{percent(course.flushed)} -> {percent(better.flushed)}",
        change={
            "operand": operand.label,
            "fp8_recipe": {"from": None if present is None else str(present), "to": str(better.recipe)},
        },
        predicted={
            "stale_steps": {"from": len(course.stale), "to": len(better.stale)},
            "largest_saturated_share": {"from": course.clipped, "to": better.clipped},
            "flushed_share": {"from": course.flushed, "to": better.flushed},
        },
        snippet=snippet(better.recipe, operand.fmt.max, operand.fmt.dtype),
    )


RULE = Rule(
    code="PD404",
    name="stale-fp8-scale",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "stale_share",
            0.1,
            "fraction",
            "Steps on which the scale is stale, among the recorded ones and among the newer half of them.",
            "Data that do not change exceed a history of K on 1 step in K + 1: 6 % at K = 16.",
            maximum=1.0,
        ),
        RuleOption("min_stale", 2.0, "steps", "At least so many of them.", "One large batch is no condition.", 1.0),
        RuleOption(
            "lost_db",
            10.0,
            "dB",
            "Signal to noise that clipping must cost on a step, below rounding to the format's mantissa.",
            "Nine times the energy of all rounding errors; Gaussian data at a history of 1 stay below it.",
        ),
        RuleOption(
            "error_share",
            0.5,
            "fraction",
            "From this share of the steps on the finding is an error, below a warning.",
            "Precdoctor's own: most steps.",
            maximum=1.0,
        ),
        RuleOption(
            FLUSHED_SHARE.name, FLUSHED_SHARE.default, FLUSHED_SHARE.unit,
            "What a proposed recipe may flush, median over steps.", FLUSHED_SHARE.source, maximum=1.0,
        ),
        MIN_ELEMENTS,
    ),
    explains={**when(same_tensors, "PD407"), **when(worst_tensor, "PD401")},
    check=check,
)  # fmt: skip
