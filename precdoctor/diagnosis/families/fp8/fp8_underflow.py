"""PD402: FP8 casts that round to zero elements that carry weight."""

from __future__ import annotations

from collections.abc import Sequence

from precdoctor.diagnosis.analyses.harm import channel_zeros, mean_bits
from precdoctor.diagnosis.analyses.scans import Fact, facts, short_name
from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.diagnosis.claims.relations import same_module, same_tensors, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_damage import Damage, rounding_db, rounding_magnitude
from precdoctor.diagnosis.families.fp8.fp8_outliers import lost_channels, readers
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    FLUSHED_SHARE,
    LOST_DB,
    MIN_ELEMENTS,
    listed,
    seen_words,
    smallest,
)
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Tensors that a cast to a float8 dtype rounds to zero in part. The measure is the share of finite non-zero elements that
become zero, counted at the cast, in the median over the recorded steps. Softmax probabilities, GELU outputs and
gradients have many elements that are too small to matter, so the loss must also cost something. Either the flushed
elements hold more of the sum of magnitudes than rounding takes (2.3 % on average in E4M3). Or the signal to
quantisation noise, predicted from the exponents before the cast, is `lost_db` below rounding alone.

Both costs are small where one loud channel holds all the magnitude and the others are lost. A loss is therefore
harmless only if the gradient of the layer's weight agrees: rows and columns of flushed channels are exactly zero there
on every step, while scattered small elements leave no zeros. `flushed_share` of it lost that way is a finding, unless
the input or the output gradient had those zeros before the cast. A deep scan also compares each channel before and
after the cast, and follows the flushed elements to the result that they feed. If `channels` keep less signal than error
there, or as large a share of the elements is flushed, and that makes up `effect` of the result, it is a finding, too.
The first recorded step, whose history may be empty, does not count.
""",
    matters="""
A scale that is too small pushes the tensor into the subnormals of the format, where numbers have two, one and no
significant bits, and then out of it. Nothing overflows and nothing is NaN; the layer simply learns less.
""",
    example="""
A gradient of 1e-5 cast without a scale; E4M3 flushes all up to 2^-10:

    grad.to(torch.float8_e4m3fn)                    # nearly all zero
    scale = 448.0 / grad.abs().amax()
    (grad * scale).to(torch.float8_e4m3fn)          # none of it
""",
    remedy="""
Scale by the tensor's own amax. Where the amax scale flushes as much (one outlier sets it, or the tensor is wide), cast
a gradient to E5M2, and anything else to a block format or not at all; the finding names the smallest change that is
enough. `precdoctor whatif RUN --kind fp8_operand --format mxfp8` predicts block formats for all operands.
""",
    confidence="""
0.9: flushed elements are counted at the cast. 0.7 with fewer than four steps. The cost is predicted from the exponent
histogram, in dB to within a few tenths.
""",
    references=(
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433",
        "OCP 8-bit Floating Point Specification (OFP8) revision 1.0",
        "NVIDIA BioNeMo framework, published gradient-underflow bands 0.5 / 2 / 4 %",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the operand that loses most, the others above the limits as evidence."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    judged = [o for o in found.values() if o.numel >= options["min_elements"]]
    flushing = [o for o in judged if o.flushed_share >= options["flushed_share"]]
    guilty = [o for o in flushing if _is_harmful(view, o, options)]
    if not guilty:
        worst = max((o.flushed_share for o in judged), default=0.0)
        weightless = ", less than rounding takes, and no recorded weight gradient misses a channel" if flushing else ""
        return Checked((), f"{seen_words(found)}: at most {percent(worst)} flushed{weightless}")
    guilty.sort(key=lambda o: (-o.flushed_share, o.key))
    finding = _finding(view, guilty, options)
    return Checked([finding], f"{plural(len(guilty), 'operand')} of {seen_words(found)} above the limits")


def _is_harmful(view: RunView, operand: Operand, options: Options) -> bool:
    """Return whether the flushed elements matter: by their magnitude, by noise, by lost channels or in a deep scan."""
    if operand.cost.is_harmful(operand.fmt, options["lost_db"]):
        return True
    return lost_channels(view, operand) >= options["flushed_share"] or _scan_proof(view, operand, options) is not None


def _scan_proof(view: RunView, operand: Operand, options: Options) -> Fact | None:
    """Return the deep-scan fact with the largest effect of the flushed elements; None if it is below the limits.

    A scan compares each channel before and after the cast, and follows the flushed elements to the result they feed.
    Two steps must have such a fact.
    """
    sizes = set(operand.settled.numel.tolist())
    found = [
        f
        for f in facts(view, "cast")
        if (f.root, f.module) in (operand.key[:2], ("", ""))
        and f.data.get("to") == operand.fmt.dtype
        and f.count("numel") in sizes
        and f.number("effect") > 0.0
    ]
    fact = max(found, key=lambda f: f.number("effect"), default=None)
    if fact is None or len({f.step for f in found}) < 2 or fact.number("effect") < options["effect"]:
        return None
    return fact if max(fact.number("channels"), fact.share("flushed", "nonzero")) >= options["channels"] else None


def _finding(view: RunView, guilty: Sequence[Operand], options: Options) -> Finding:
    operand = guilty[0]
    cast, cost = operand.typical, operand.cost
    lost, bits = lost_channels(view, operand), mean_bits(cast.statistics.histogram, operand.fmt)
    read_by = next(iter(readers(view, operand)), operand.key[:2]) if lost else operand.key[:2]
    zeros = channel_zeros(view).get(read_by)
    starving = zeros.steps if zeros is not None and lost else 0
    proof = (
        f"{percent(lost)} of the gradient of the weight of `{read_by[1] or read_by[0]}` is exactly zero because of it"
        + (f", on all {plural(starving, 'recorded step')}" if starving == len(operand.casts) else "")
        + ": whole channels are gone. "
        if lost
        else _scanned_words(_scan_proof(view, operand, options), options)
    )
    sure, why = operand.confidence
    share = operand.flushed_share
    return RULE.finding(
        severity=Severity.ERROR if share >= options["error_share"] else Severity.WARNING,
        confidence=sure,
        title=f"{percent(share)} of the {operand.label} is flushed to zero in {operand.fmt.name}",
        message=f"{percent(share)} of the non-zero elements of the {operand.label} become zero in the cast to "
        f"{operand.fmt.dtype}, in the median of {plural(len(operand.settled), 'step')} (limit "
        f"{percent(options['flushed_share'])}). Its non-zero elements keep {bits:.1f} of "
        f"{operand.fmt.mantissa_bits + 1} significant bits on average. {proof}{_cost_words(cost, operand, options)} "
        f"At step {cast.step} "
        f"{cast.scale_words}; in the median {operand.padding:.1f} binades below {operand.fmt.max:g} are unused. "
        f"{plural(len(guilty), 'operand')} above the limits.",
        location=operand.location(cast),
        evidence={
            "flushed_share": share,
            "limit": options["flushed_share"],
            "lost_magnitude_share": cost.lost_magnitude,
            "sqnr_db": cost.sqnr_db,
            "lost_db": cost.lost_db,
            "lost_channel_share": lost,
            "mean_significant_bits": bits,
            "steps_without_weight_gradient": starving,
            "padding_binades": operand.padding,
            "steps_examined": len(operand.settled),
            "tensors": listed(guilty, "flushed_share"),
            **operand.evidence(view, cast),
            "confidence_reason": why,
        },
        prescription=smallest(view, operand, options["flushed_share"], options["lost_db"]).prescription_after(cost),
    )


def _scanned_words(fact: Fact | None, options: Options) -> str:
    """State what the deep scan measured, in a sentence; empty without a fact."""
    if fact is None:
        return ""
    op, there = fact.where("fed")
    channels, effect = fact.number("channels"), percent(fact.number("effect"))
    lost = (
        f"{percent(channels)} of its channels keep less signal than error"
        if channels >= options["channels"]
        else f"{percent(fact.share('flushed', 'nonzero'))} of its elements are flushed"
    )
    return (
        f"In the deep scan of step {fact.step} {lost} (limit "
        f"{percent(options['channels'])}); the flushed elements make up {effect} of the result of "
        f"{short_name(op)}{there} (limit {percent(options['effect'])}). "
    )


def _cost_words(cost: Damage, operand: Operand, options: Options) -> str:
    fmt = operand.fmt
    return (
        f"Flushing takes {percent(cost.lost_magnitude)} of its magnitude (rounding takes "
        f"{percent(rounding_magnitude(fmt))}); the signal to noise is {cost.sqnr_db:.1f} dB, {cost.lost_db:.1f} dB "
        f"below the {rounding_db(fmt):.1f} dB of {fmt.name} at a fitting scale (limit {options['lost_db']:g})."
    )


RULE = Rule(
    code="PD402",
    name="fp8-underflow",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        FLUSHED_SHARE,
        LOST_DB,
        fraction("error_share", 0.5, "Flushed share from which the finding is an error.",
                 "Chosen empirically: half of a tensor is no tail."),
        fraction("channels", 0.25, "Share of channels, in a deep scan, that keep less signal than error; "
                 "or of elements that are flushed.", "Chosen empirically: a quarter of the features is no tail."),
        fraction("effect", 0.1, "Share of the next result that the flushed elements must make up then.",
                 "Four times the mean rounding error of E4M3, 2.3 %."),
        MIN_ELEMENTS,
    ),
    explains={**when(same_module, "PD203", "PD706"), **when(same_tensors, "PD407")},
    check=check,
    newer_half=True,
)  # fmt: skip
