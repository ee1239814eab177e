"""PD408: a few outliers set the FP8 scale of a tensor and cost all the rest of it precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_tensors, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_outliers import (
    LOST_CHANNELS,
    Bulk,
    bulk_of,
    lost_channels,
    matters,
)
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import (
    LOST_DB,
    MIN_ELEMENTS,
    SIZES,
    Cure,
    histograms,
    in_blocks_apart,
    kept_wide,
    listed,
    seen_words,
    smoothed,
)
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Tensors cast to a float8 dtype with one scale, where a few outliers cost all the rest precision. Outliers lie more than
4 binades above the median magnitude and are at most `outlier_share` of the elements. The rest, the bulk, loses
`lost_db` of signal to noise at the scale of the tensor's amax against a scale of its own. With half of the bulk flushed
the finding is an error.

Three things are not reported. A large ratio of amax to RMS alone: a floating-point format has binades to spare (18.8 in
E4M3), and an outlier a thousand times the rest costs it nothing. A bulk with less of the sum of magnitudes than
rounding takes from the outliers, such as the small probabilities of a softmax, unless whole channels of the layer's
weight gradient are zero because of it. And tensors that blocks would not help: at least half of the recorded 1x128 or
1x32 blocks must hold no outlier.
""",
    matters="""
A handful of channels of transformer activations are thousands of times larger than the rest. Under one scale per
tensor the rest falls into the subnormals of the format, or is flushed, while the error of the whole, which the outliers
dominate, looks fine. Less severe gains are a choice: where block scales gain 1 or 2 dB, they cost 3.1 % of the FP8
bytes and kernels that take them.
""",
    example="""
One channel of 1024 that is 2^14 times the others, in E4M3: the others lose 8 dB, and 9 % of them become zero. In tiles
of 128 seven of eight tiles lose nothing.
""",
    remedy="""
Scale per 1x128 tile or MX block, smooth the channel into the weight (divide the activation's channel, multiply the
weight's row), or keep this one operand wide. `precdoctor whatif RUN --kind fp8_operand` with `--format e4m3`, then with
`--scaling tile128` or `--format mxfp8`, compares one scale and a scale per block for every operand.
""",
    confidence="""
0.85 with block histograms on three steps, 0.7 with fewer. The precision of the bulk is predicted from the
exponents, to within a few tenths of a dB.
""",
    references=(
        "Dettmers et al., LLM.int8(), arXiv:2208.07339 (outlier features)",
        "Xiao et al., SmoothQuant, arXiv:2211.10438",
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3 (1x128 tiles)",
    ),
)


@dataclass(frozen=True, eq=False)
class _Outlying:
    """An operand whose bulk loses precision to a few outliers; ``cure``: blocks that would help."""

    operand: Operand
    bulk: Bulk
    cure: Cure
    #: Share of the blocks with an outlier.
    hot: float


def check(view: RunView, options: Options) -> Checked:
    """One finding: the operand whose bulk loses most."""
    found = operands(view)
    if not found:
        return Checked.not_applicable("no tensor is cast to a float8 dtype")
    judged = [o for o in found.values() if o.per_tensor and o.numel >= options["min_elements"]]
    if not judged:
        return Checked((), f"{seen_words(found)}: none with one scale per tensor")
    bulks = [(o, b) for o in judged if (b := bulk_of(o)) is not None]
    few = [(o, b) for o, b in bulks if b.outliers <= options["outlier_share"] and b.lost_db >= options["lost_db"]]
    hurt = [(o, b) for o, b in few if matters(view, o, b)]
    mended = [(o, b, in_blocks_apart(view, o, options["hot_blocks"])) for o, b in hurt]
    guilty = [_Outlying(o, b, *blocks) for o, b, blocks in mended if blocks is not None]
    if not guilty:
        worst = max((b.lost_db for o, b in bulks if matters(view, o, b)), default=0.0)
        recorded = any(histograms(view, o, size) for o, _ in hurt for size in SIZES)
        unknown = "; their blocks were not recorded" if hurt and not recorded else ""
        return Checked((), f"{seen_words(found)}: outliers cost the rest {worst:.1f} dB at most{unknown}")
    guilty.sort(key=lambda g: (-g.bulk.lost_db, g.operand.key))
    return Checked([_finding(view, guilty, options)], f"{len(guilty)} of {seen_words(found)}")


def _finding(view: RunView, guilty: Sequence[_Outlying], options: Options) -> Finding:
    worst = guilty[0]
    operand, bulk = worst.operand, worst.bulk
    cast, size = operand.typical, worst.cure.change["block"]
    steps = len(histograms(view, operand, size))
    return RULE.finding(
        severity=Severity.ERROR if bulk.flushed >= 0.5 else Severity.WARNING,
        confidence=0.85 if steps >= 3 else 0.7,
        title=f"outliers in the {operand.label} cost the rest of it {bulk.lost_db:.1f} dB in {operand.fmt.name}",
        message=f"{percent(bulk.outliers)} of the elements of the {operand.label} reach {bulk.distance:.1f} binades "
        f"beyond the rest and set its scale. At the scale of the tensor's amax the rest keeps {bulk.sqnr_db:.1f} dB "
        f"of signal to noise, {bulk.lost_db:.1f} dB less than at a scale of its own (limit {options['lost_db']:g}), "
        f"and {percent(bulk.flushed)} of it becomes zero; it holds {percent(bulk.magnitude)} of the sum of magnitudes. "
        f"The outliers sit in {percent(worst.hot)} of the blocks of {size}: with a scale per block the other "
        f"{percent(1.0 - worst.hot)} lose nothing to them. Affected: {plural(len(guilty), 'operand')}.",
        location=operand.location(cast),
        evidence={
            "lost_db": bulk.lost_db,
            "limit": options["lost_db"],
            "bulk_sqnr_db": bulk.sqnr_db,
            "bulk_flushed_share": bulk.flushed,
            "bulk_magnitude_share": bulk.magnitude,
            "outlier_share": bulk.outliers,
            "lost_channel_share": lost_channels(view, operand),
            "distance_binades": bulk.distance,
            "hot_blocks": worst.hot,
            "block": size,
            "flushed_in_blocks": worst.cure.damage.flushed,
            "steps_examined": len(operand.settled),
            "tensors": listed((g.operand for g in guilty), "flushed_share"),
            **operand.evidence(view, cast),
            "confidence_reason": f"exponents of elements and of blocks of {size} on {plural(steps, 'step')}",
        },
        prescriptions=_prescriptions(view, worst),
    )


def _prescriptions(view: RunView, worst: _Outlying) -> tuple[Prescription, ...]:
    """Prescribe blocks, smoothing and no cast; blocks or smoothing that flush little come first."""
    cost = worst.operand.cost
    offered = [(worst.cure.damage.flushed, _prescribe(worst))]
    offered += [(c.damage.flushed, c.prescription_after(cost)) for c in smoothed(view, worst.operand)]
    wide = kept_wide(worst.operand).prescription_after(cost)
    best = [p for _, p in sorted(offered, key=lambda o: o[0] >= LOST_CHANNELS)]
    return (*best, wide)


def _prescribe(worst: _Outlying) -> Prescription:
    """Prescribe blocks with their gain for the bulk, because figures of the whole tensor are those of its outliers."""
    bulk, cure, whole, cold = worst.bulk, worst.cure, worst.operand.fitted, 1.0 - worst.hot
    return cure.prescription(
        f"flushed {percent(whole.flushed)} -> {percent(cure.damage.flushed)}, SQNR of the rest "
        f"{bulk.sqnr_db:.1f} -> {bulk.sqnr_db + bulk.lost_db:.1f} dB in {percent(cold)} of the blocks",
        {
            "flushed_share": {"from": whole.flushed, "to": cure.damage.flushed},
            "bulk_sqnr_db": {"from": bulk.sqnr_db, "to": bulk.sqnr_db + bulk.lost_db},
            "share_of_blocks": cold,
        },
    )


RULE = Rule(
    code="PD408",
    name="fp8-outlier-channels",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        replace(LOST_DB, doc="Signal to noise that the bulk loses at the scale of the tensor's amax."),
        fraction("outlier_share", 0.05, "Largest share of elements above the bulk that count as outliers.",
                 "One channel of twenty; LLM.int8() finds 0.1 % of the features."),
        fraction("hot_blocks", 0.5, "Largest share of blocks with an outlier for blocks to help.",
                 "Chosen empirically: half of the tensor must gain."),
        MIN_ELEMENTS,
    ),
    explains=when(same_tensors, "PD402", "PD407"),
    check=check,
    newer_half=True,
)  # fmt: skip
