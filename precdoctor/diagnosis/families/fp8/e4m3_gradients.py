"""PD403: gradients cast to E4M3 with one scale per tensor, although they need the range of E5M2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from precdoctor.diagnosis.analyses.optimizer_states import divides_by_gradient
from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.diagnosis.claims.relations import same_tensors, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_outliers import bulk_of, dead_blocks, matters
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    FLUSHED_SHARE,
    LOST_DB,
    MIN_ELEMENTS,
    SIZES,
    histograms,
    in_e5m2,
    listed,
    seen_words,
)
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import E4M3FN, E5M2

PAGE = RulePage(
    finds="""
Gradients that are cast to E4M3 with one scale for the whole tensor and lose more than the limit at the cast, flushed
or clipped, *although* the scale is not to blame. At the scale of each step's own amax E4M3 would still flush more than
the limit, and E5M2 at most half of that. Both are computed from the exponents before the cast.

The loss must also cost something. Either the flushed elements hold more of the sum of magnitudes than rounding takes
(as in PD402), or the bulk of the gradient loses `lost_db` of signal to noise (as in PD408). Or whole rows are lost:
`lost_blocks` of the recorded blocks along the last dimension (tokens, samples or parts of them) lose every element, and
the optimizer divides gradients by their own size, so that a small gradient counts as much as a large one wherever it
arrives alone (an embedding row, an expert). E4M3 for gradients is no fault as such: recipes use it with scales per tile
or block.
""",
    matters="""
Gradients spread over more binades than activations. From its largest number to the smallest that is not flushed E4M3
has 18.8 binades, E5M2 32.8, at the price of one mantissa bit. Where a few tokens set the amax, the gradient of most
others is flushed.
""",
    example="""
    scale = 448.0 / grad.abs().amax()
    grad8 = (grad * scale).to(torch.float8_e4m3fn)       # forward format for a gradient: 12 % become zero
    scale = 57344.0 / grad.abs().amax()
    grad8 = (grad * scale).to(torch.float8_e5m2)         # 0.01 %
""",
    remedy="""
Cast gradients to E5M2 (frameworks call the pair HYBRID), or keep E4M3 and scale per 1x128 tile. The finding gives the
flushed share under both.
""",
    confidence="""
0.9: flushed elements are counted at the cast. 0.7 with fewer than four steps, and where whole rows are the only cost:
samples that are already learnt lose nothing. The effect of E5M2 lies between bounds from the exponent histogram, as a
rule a few tenths of a percent apart.
""",
    references=(
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, section 3",
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3 (E4M3 everywhere, with tiles)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the gradient that loses most, the others as evidence."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    gradients = {k: o for k, o in found.items() if o.gradient}
    narrow = [o for o in gradients.values() if o.fmt.mantissa_bits == E4M3FN.mantissa_bits]
    judged = [o for o in narrow if o.per_tensor and o.numel >= options["min_elements"]]
    if not judged:
        if not gradients:
            return Checked((), f"{seen_words(found)}: no gradient among them")
        words = "with a scale per tensor" if narrow else "in E4M3"
        return Checked((), f"{seen_words(gradients)} that are gradients: none {words}")
    wide = [o for o in judged if _needs_range(o, options)]
    guilty = [o for o in wide if _is_harmed(view, o, options) or _dead_block_share(view, o) >= options["lost_blocks"]]
    if not guilty:
        worst = max(o.flushed_share for o in judged)
        weightless = ", less than rounding takes, and no recorded weight gradient misses a channel" if wide else ""
        return Checked((), f"{plural(len(judged), 'gradient')} in E4M3: at most {percent(worst)} flushed{weightless}")
    guilty.sort(key=lambda o: (-_lost_share(o), o.key))
    return Checked([_finding(view, guilty, options)], f"{len(guilty)} of {plural(len(judged), 'gradient')} in E4M3")


def _lost_share(operand: Operand) -> float:
    """Return the flushed or the clipped share, whichever is larger."""
    return max(operand.flushed_share, operand.saturated_share)


def _needs_range(operand: Operand, options: Options) -> bool:
    """Return whether the cast loses too much, the scale of amax would too, and E5M2 flushes at most half of that."""
    limit = options["flushed_share"]
    if _lost_share(operand) < limit:
        return False
    fitted = operand.fitted.flushed
    return fitted >= limit and operand.fitted_to(E5M2).flushed <= 0.5 * fitted


def _is_harmed(view: RunView, operand: Operand, options: Options) -> bool:
    """Return whether casting at the scale of amax makes too much noise, in the gradient or in a bulk that matters."""
    if operand.fitted.is_harmful(operand.fmt, options["lost_db"]):
        return True
    bulk = bulk_of(operand)
    return bulk is not None and matters(view, operand, bulk) and bulk.lost_db >= options["lost_db"]


def _dead_block_share(view: RunView, operand: Operand) -> float:
    """Return the median share of blocks that are flushed whole; 0 if no blocks were recorded.

    0 also unless the optimizer divides gradients by their own size.
    """
    if not divides_by_gradient(view):
        return 0.0
    each = next((found for size in SIZES if (found := histograms(view, operand, size))), [])
    return median(dead_blocks(h, operand.fmt) for h, _ in each) if each else 0.0


def _finding(view: RunView, guilty: Sequence[Operand], options: Options) -> Finding:
    operand = guilty[0]
    cast, before, cure = operand.typical, operand.cost, in_e5m2(operand)
    fitted, rows = operand.fitted.flushed, _dead_block_share(view, operand)
    sure, why = operand.confidence
    whole = ""
    if rows >= options["lost_blocks"]:
        whole = (
            f"{percent(rows)} of its blocks along the last dimension lose every element (limit "
            f"{percent(options['lost_blocks'])}). The gradient of these tokens or samples is gone, although the "
            "optimizer, which divides by a gradient's own size, would have used it. "
        )
        if not _is_harmed(view, operand, options):
            sure, why = 0.7, "counted at the cast; the weight of the lost rows is not known"
    return RULE.finding(
        confidence=sure,
        title=f"{percent(_lost_share(operand))} of the {operand.label} is lost in E4M3; E5M2 would flush "
        f"{percent(cure.damage.flushed)}",
        message=f"The {operand.label} is cast to {operand.fmt.dtype} with one scale per tensor: "
        f"{percent(operand.flushed_share)} of its non-zero elements become zero and "
        f"{percent(operand.saturated_share)} are clipped, in the median of {plural(len(operand.settled), 'step')} "
        f"(limit {percent(options['flushed_share'])}). The scale is not to blame: at each step's own amax E4M3 "
        f"would flush {percent(fitted)}, E5M2 {percent(cure.damage.flushed)}. "
        f"{whole}Affected: {plural(len(guilty), 'gradient')}.",
        location=operand.location(cast),
        evidence={
            "flushed_share": operand.flushed_share,
            "saturated_share": operand.saturated_share,
            "limit": options["flushed_share"],
            "flushed_at_amax_scale": fitted,
            "flushed_in_e5m2": cure.damage.flushed,
            "blocks_flushed_whole": rows,
            "steps_examined": len(operand.settled),
            "tensors": listed(guilty, "flushed_share"),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=cure.prescription_after(before),
    )


RULE = Rule(
    code="PD403",
    name="e4m3-gradients",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        FLUSHED_SHARE,
        replace(LOST_DB, doc="Signal to noise that the gradient or its bulk must lose."),
        fraction("lost_blocks", 0.25,
                 "Least share of blocks of 128 (or 32) elements that become zero whole, median over their steps.",
                 "Chosen empirically: a quarter of the samples; E5M2 keeps them at no cost in memory."),
        MIN_ELEMENTS,
    ),
    explains=when(same_tensors, "PD402", "PD407", "PD408"),
    check=check,
    newer_half=True,
)  # fmt: skip
