"""PD107: an overflow inside a module that a later op hides, with a wrong result left behind."""

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
An op, on a step that was looked at op by op (`record --deep-scan`), that makes an infinity or a NaN of finite operands
where FP64 would not, inside a module whose outputs are finite: a later op (`rsqrt`, a division, `nan_to_num`, a clamp)
has made an ordinary number of it. The right values are carried along in FP64 from the overflow on, and the finding is
about the finite elements that come out off by more than half. What comes out right is no finding, whatever was infinite
on the way: masks of -Inf, `where` around a branch that is not taken, `tanh` and `sigmoid` of an overflow, a clamp below
the format's largest number, `1 / (1 + exp(-x))`. Nor are wrong numbers that are added to much larger ones: less than
`effect` of the sum.
""",
    matters="""
Nothing in the loss, the gradients or the module outputs is non-finite, so nothing stops and nothing is reported. A
normaliser that is infinite multiplies its rows by zero: the layer is switched off for exactly the inputs that are
largest.
""",
    example="""
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)  # FP16: 300 * 300 is Inf, and rsqrt(Inf) is 0
    return x * scale.detach()                                  # 0 instead of about 1
""",
    remedy="""
Do this arithmetic in FP32 (`x.float()` before the square), or divide by the largest magnitude before squaring and
multiply by it afterwards. In FP32 already: rescale, or use the fused function (`F.rms_norm`, `F.normalize`,
`torch.linalg.vector_norm`, `logsumexp`), which does.
""",
    confidence="""
0.95: the op was seen, its operands and its result were counted, and the right values were computed in FP64 beside it.
0.7 when one scanned step alone shows it, or when it could not be followed to the result it feeds.
""",
    references=(
        "IEEE 754-2019, section 7.4 (overflow) and section 6.1 (arithmetic with infinities)",
        "Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467 (the statistics in FP32)",
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

    return check_facts(view, ("overflow",), guilty, tell, seen="no overflow that leaves a wrong number behind")


def _finding(view: RunView, group: Group, options: Options) -> Finding:
    fact = group.worst
    wrong, of, affected = fact.count("wrong"), fact.count("of"), fact.count("affected")
    shown, _ = fact.where("shown_by")
    hidden, source = fact.where("hidden_by")
    swallower = short_name(hidden or shown)
    there = f" at {source.file}:{source.line}" if source is not None else ""
    seen, exact, share = fact.number("seen"), fact.number("exact"), percent(wrong_share(fact))
    message = (
        f"At step {fact.step}, {fact.op}{fact.line} {place_words(fact)} made {affected:,} non-finite elements "
        f"({fact.dtype}) where FP64 gives up to {fact.number('exact_amax'):.4g}. {swallower}{there} turned them into "
        f"finite numbers; after {short_name(shown)}, {wrong:,} of {of:,} elements ({share}, limit "
        f"{percent(options['wrong_share'])}) are off by more than half, for instance {seen:.4g} where FP64 gives "
        f"{exact:.4g}. Neither the module's outputs nor the loss show it."
        f"{effect_words(fact, options['effect'])}{elsewhere_words(group)}"
    )
    confidence, reason = certainty(group, 0.95, _REASON)
    return Finding(
        code="PD107",
        name="swallowed-nonfinite",
        severity=Severity.WARNING,
        confidence=confidence,
        title=f"{fact.short} overflows {place_words(fact)} and {swallower} hides it: {share} of "
        f"the result is wrong{fact.line}",
        message=message,
        location=locate(view, group),
        evidence=evidence_of(group, {n: options[n] for n in ("wrong_share", "effect")}, reason),
        prescriptions=(_prescription(fact, affected, wrong),),
    )


def _prescription(fact: Fact, affected: int, wrong: int) -> Prescription:
    narrow, reach = known_format(fact.dtype), fact.number("exact_amax")
    predicted = {"nonfinite_elements": {"from": affected, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}}
    if narrow is not None and narrow.max < reach <= FP32.max:
        return Prescription(
            title=f"compute `{fact.short}`{fact.line} in FP32: {reach:.4g} is {FP32.headroom(reach):.0f} binades below "
            f"its end; non-finite elements {affected:,} -> 0",
            change={"compute_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
            predicted=predicted,
            snippet="y = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)  # widen first\n",
        )
    return Prescription(
        title=f"scale before `{fact.short}`{fact.line}: its exact result reaches {reach:.4g}; non-finite elements "
        f"{affected:,} -> 0",
        change={"scale_before": fact.op},
        predicted=predicted,
        snippet=(
            "largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)\n"
            "norm = largest * (x / largest).square().sum(-1, keepdim=True).sqrt()  # no square leaves the range\n"
        ),
    )


RULE = Rule(
    code="PD107",
    name="swallowed-nonfinite",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "wrong_share",
            0.001,
            "fraction",
            "Share of a result's elements that may be finite and off by more than half.",
            "Precdoctor's own: one row in a thousand; a single element may be an edge nobody reads.",
            maximum=1.0,
        ),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)
