"""PD409: operands that a scale per block would serve better than one per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Damage, Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_outliers import bulk_of, cut, hot_blocks, matters, spread
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    MIN_ELEMENTS,
    Cure,
    histograms,
    in_blocks,
    listed,
    location,
    seen_words,
)
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Tensors cast to a float8 dtype with one scale that would gain `gain_db` of signal to noise, as a whole or in their bulk
(PD408), with a scale per 1x128 tile or MX block of 32, both predicted: per tensor at the scale of each step's own amax,
so that a bad scale does not count for blocks, and per block from the recorded block histograms. Information, only
where FP8 is in use. Where blocks would not help, the rule passes and says so with the two figures.
""",
    matters="""
Block formats cost memory for scales (3.1 % of the FP8 bytes for 1x128 with FP32 scales or MX blocks of 32) and kernels
that take them. A float format has binades to spare, so many tensors gain nothing; which do is a matter of measurement.
""",
    example="""
64x1024 Gaussian elements with one outlier at 667 sigma in E4M3: error of the others 2.63 % per tensor, 2.57 % in
tiles of 128. With an outlier at 2^14 sigma: 6 % and 2.57 %.
""",
    remedy="""
Use the block format for the operands in the list, or wait until PD402, PD403 or PD408 says that it matters. `precdoctor
whatif RUN --format mxfp8` gives the figures for all tensors.
""",
    confidence="""
0.8: both sides are predicted from exponents, to within a few tenths of a dB. They speak for contractions along the last
dimension, along which blocks are recorded.
""",
    references=(
        "OCP Microscaling Formats (MX) Specification 1.0",
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3 (1x128 tiles)",
    ),
)


#: Operands whose median lies no further below their amax have it well inside the normal range, and gain nothing ...
_AT_EASE = 9.0
#: ... but a few are predicted all the same, for the figures.
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class _Compared:
    operand: Operand
    whole: Damage
    cure: Cure
    gain: float
    #: Share of the blocks that gain it.
    cold: float


def check(view: RunView, options: Options) -> Checked:
    """One finding: the operand that would gain most, the others above the limit as evidence."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    judged = [o for o in found.values() if o.per_tensor and o.settled[0].numel >= options["min_elements"]]
    judged.sort(key=lambda o: -spread(o))
    wide = [o for i, o in enumerate(judged) if i < _SHOWN or spread(o) > _AT_EASE]
    compared = [c for o in wide if (c := _compared(view, o)) is not None]
    if not compared:
        why = "no block histograms of operands with one scale per tensor"
        return Checked((), f"{seen_words(found)}: {why}")
    gaining = [c for c in compared if c.gain * c.cold >= options["gain_db"]]
    if not gaining:
        whole, blocked = (
            median(d.sqnr_db for d in side) for side in ([c.whole for c in compared], [c.cure.damage for c in compared])
        )
        words = f"{whole:.1f} dB with one scale, {blocked:.1f} dB with one per block"
        return Checked((), f"{plural(len(judged), 'FP8 operand')}: a block format would not help ({words})")
    gaining.sort(key=lambda c: (-c.gain * c.cold, c.operand.key))
    return Checked([_finding(view, gaining, len(judged), options)],
                   f"{len(gaining)} of {plural(len(judged), 'FP8 operand')} would gain by blocks",
                   Status.FAILED)  # fmt: skip


def _compared(view: RunView, operand: Operand) -> _Compared | None:
    """With the coarsest blocks that were recorded."""
    cure = next(in_blocks(view, operand), None)
    if cure is None:
        return None
    gain = operand.fitted.lost_db - cure.damage.lost_db
    bulk = bulk_of(operand)
    if bulk is not None and matters(view, operand, bulk):
        size = 128 if histograms(view, operand, 128) else 32
        last = round(median(cut(c.statistics.histogram) for c in operand.spots))
        hot = median(hot_blocks(h, last) for h, _ in histograms(view, operand, size))
        if bulk.lost_db * (1.0 - hot) > gain:
            return _Compared(operand, operand.fitted, cure, bulk.lost_db, 1.0 - hot)
    return _Compared(operand, operand.fitted, cure, gain, 1.0)


def _finding(view: RunView, gaining: Sequence[_Compared], of: int, options: Options) -> Finding:
    best = gaining[0]
    operand, cure = best.operand, best.cure
    cast = operand.typical
    return Finding(
        code="PD409",
        name="fp8-block-scaling",
        severity=Severity.INFO,
        confidence=0.8,
        title=f"a scale per block would gain {best.gain:.1f} dB in the {operand.label}",
        message=f"{len(gaining)} of {plural(of, 'FP8 operand')} would gain {options['gain_db']:g} dB (limit) or more "
        f"of signal to noise with a scale per block, the {operand.label} most: {best.gain:.1f} dB in "
        f"{percent(best.cold)} of its blocks. With one scale at its amax {percent(best.whole.flushed)} is flushed, "
        f"with blocks {percent(cure.damage.flushed)}. Scales add 3.1 % to the FP8 bytes.",
        location=location(operand, cast),
        evidence={
            "gain_db": best.gain,
            "share_of_blocks": best.cold,
            "limit": options["gain_db"],
            "operands_compared": of,
            "flushed_per_tensor": best.whole.flushed,
            "flushed_in_blocks": cure.damage.flushed,
            "tensors": listed((c.operand for c in gaining), lambda o: {"sqnr_db": o.fitted.sqnr_db}),
            **operand.evidence(view, cast),
            "confidence_reason": "both sides are predicted from recorded exponents",
        },
        prescriptions=(_prescribe(best),),
    )


def _prescribe(best: _Compared) -> Prescription:
    cure, flushed = best.cure, best.cure.damage.flushed
    return Prescription(
        title=f"{cure.words}: {best.gain:.1f} dB more in {percent(best.cold)} of its blocks, flushed "
        f"{percent(best.whole.flushed)} -> {percent(flushed)}",
        change=cure.change,
        predicted={
            "flushed_share": {"from": best.whole.flushed, "to": flushed},
            "gain_db": best.gain,
            "share_of_blocks": best.cold,
        },
        snippet=cure.snippet,
    )


RULE = Rule(
    code="PD409",
    name="fp8-block-scaling",
    severity=Severity.INFO,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "gain_db", 1.5, "dB", "Signal to noise an operand must gain.",
            "A quarter of a mantissa bit (6.02 dB); predictions are good to a few tenths.",
        ),
        MIN_ELEMENTS,
    ),
    check=check,
)  # fmt: skip
