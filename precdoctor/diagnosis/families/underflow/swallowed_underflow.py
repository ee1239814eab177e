"""PD206: an intermediate result that is zero only because its format ends, and the wrong result it leads to."""

from __future__ import annotations

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.scans import (
    EFFECT,
    Fact,
    Group,
    certainty,
    check_facts,
    effect_words,
    elsewhere_words,
    evidence_of,
    has_effect,
    locate,
    place_words,
    short_name,
    wrong_share,
)
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

PAGE = RulePage(
    finds="""
An op, on a step that was looked at op by op (`record --deep-scan`), whose result is zero for a quarter or more of the
elements that are not zero in FP64: products, squares, exponentials, casts. The right values are carried along in FP64,
and the finding is about what comes of it: finite numbers, representable ones, that are off by more than half. Zeros
that nothing is made of are no finding: probabilities that only weigh other terms, squares below an epsilon that is
larger, ReLU, dropout and masks, which are zero in FP64 as well. A guard at the least number of the format itself
(`clamp(min=torch.finfo(x.dtype).tiny)`) is taken to be that of FP64 there. Nor are wrong numbers that end as less than
`effect` of a sum, or that a later scan no longer sees: weights that begin at zero are flushed until they have grown.
""",
    matters="""
A variance of zero makes `rsqrt(0 + eps)` as large as eps allows, a scale of zero switches a layer off, a ratio of two
flushed numbers is noise. The values are all finite, and the histograms of module outputs look ordinary.
""",
    example="""
    var = (x * x).mean(-1, keepdim=True)              # FP16: 1e-4 * 1e-4 is below 2^-25, so it is 0
    return x * torch.rsqrt(var.float() + 1e-12)       # a million instead of ten thousand
""",
    remedy="""
Widen before the small numbers are made: `x.float()` before the square, `softmax(..., dtype=torch.float32)`, a scale
that is applied first. Widening afterwards keeps the zero.
""",
    confidence="""
0.95: the op was seen, its zeros were counted, and the right values were computed in FP64 beside it. 0.7 when one
scanned step alone shows it, or when it could not be followed to the result it feeds.
""",
    references=(
        "IEEE 754-2019, section 7.5 (underflow); FP16 rounds to zero at and below 2^-25",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 (arithmetic in FP32, storage in FP16)",
    ),
)
_REASON = "the op was seen and the right values were computed in FP64 beside it"


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        share = wrong_share(fact)
        return share if share >= options["wrong_share"] and has_effect(fact, options["effect"]) else 0.0

    def tell(group: Group) -> Finding:
        return _finding(view, group, options)

    seen = "no underflow that leaves a wrong number behind"
    return check_facts(view, ("underflow",), guilty, tell, seen=seen, flushes=lambda _: True)


def _finding(view: RunView, group: Group, options: Options) -> Finding:
    fact = group.worst
    wrong, of, affected = fact.count("wrong"), fact.count("of"), fact.count("affected")
    op, source = fact.where("shown_by")
    there = f" at {source.file}:{source.line}" if source is not None else ""
    share = percent(wrong_share(fact))
    message = (
        f"At step {fact.step}, {fact.op}{fact.line} {place_words(fact)} flushed {affected:,} elements to zero "
        f"({fact.dtype}) that are up to {fact.number('exact_amax'):.4g} in FP64. {short_name(op)}{there} made "
        f"{wrong:,} of {of:,} elements of it ({share}, limit {percent(options['wrong_share'])}) that are off by more "
        f"than half, for instance {fact.number('seen'):.4g} where FP64 gives {fact.number('exact'):.4g}."
        f"{effect_words(fact, options['effect'])}{elsewhere_words(group)}"
    )
    confidence, reason = certainty(group, 0.95, _REASON)
    return Finding(
        code="PD206",
        name="swallowed-underflow",
        severity=Severity.WARNING,
        confidence=confidence,
        title=f"{fact.short} flushes to zero {place_words(fact)}, and {short_name(op)} makes wrong numbers of it: "
        f"{share} of the result{fact.line}",
        message=message,
        location=locate(view, group),
        evidence=evidence_of(group, {n: options[n] for n in ("wrong_share", "effect")}, reason),
        prescriptions=(_prescription(fact, affected, wrong),),
    )


def _prescription(fact: Fact, affected: int, wrong: int) -> Prescription:
    narrow, least = known_format(fact.dtype), fact.number("exact_amin")
    predicted = {"flushed_elements": {"from": affected, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}}
    if narrow is not None and narrow.exponent_bits < FP32.exponent_bits and least >= FP32.min_normal:
        return Prescription(
            title=f"widen before `{fact.short}`{fact.line}: in FP32 the smallest of them, {least:.3g}, is a normal "
            f"number; flushed elements {affected:,} -> 0",
            change={"compute_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
            predicted=predicted,
            snippet="y = x.float().square().mean(-1, keepdim=True)  # widened before the small numbers are made\n",
        )
    return Prescription(
        title=f"scale up before `{fact.short}`{fact.line} and down after it: the smallest exact result is {least:.3g}; "
        f"flushed elements {affected:,} -> 0",
        change={"scale_before": fact.op},
        predicted=predicted,
        snippet="largest = x.abs().amax().clamp_min(1e-30)\ny = (x / largest).square()  # times largest ** 2 later\n",
    )


RULE = Rule(
    code="PD206",
    name="swallowed-underflow",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "wrong_share",
            0.01,
            "fraction",
            "Share of a result's elements that may be finite and off by more than half.",
            "Precdoctor's own: one in a hundred; ten times as many as for an overflow, because small numbers add less.",
            maximum=1.0,
        ),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)
