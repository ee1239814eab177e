"""PD705: a variance taken as the difference of two large moments."""

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
    scans,
    short_name,
)
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Variances and covariances computed as E[x*x] - E[x]*E[x], on steps that were looked at op by op (`record --deep-scan`),
where the two moments agree in nearly all of their bits. The moments are computed in FP64 beside the run's, and what is
made of the difference is judged (`rsqrt`, `sqrt`, a division): an epsilon that is larger than the error covers it. Bits
lost are log2 of the larger moment over the difference, the median over elements. Differences of other things are no
finding: `x - x.mean()` on the numbers themselves is exact where it cancels, and so are converging predictions,
log-probabilities of two models, and straight-through estimators. Nor is one that ends as less than `effect` of a sum.

In loss code the difference of two tensors that were cast to half counts as well, where most of its elements are off by
more than half of what the numbers before the cast give: on two scanned steps or more, and on half of all of them. In a
module it counts where both are data or constants (time stamps, years and their mean), also in one column of a matrix.
""",
    matters="""
FP32 has 24 bits. With a mean 1,000 times the standard deviation 20 of them cancel, and the variance is noise, or
negative; with BF16's 8 bits a mean of ten standard deviations is enough. The normalised output is then off by a factor
that changes from row to row.
""",
    example="""
    mean = x.mean(-1, keepdim=True)
    var = (x * x).mean(-1, keepdim=True) - mean * mean   # x around 3000 with a standard deviation of 0.3
    return (x - mean) * torch.rsqrt(var + 1e-5)
""",
    remedy="""
Centre first: `(x - mean).square().mean(...)`, or call `x.var(...)`, `F.layer_norm`, `torch.cov`, which do. Over
batches, Welford's update keeps the centred sum.
""",
    confidence="""
0.95: the bits lost and the error were measured against FP64 on the run's own numbers. 0.7 when one scanned step alone
shows it, or when it could not be followed to the result it feeds.
""",
    references=(
        "Higham, Accuracy and Stability of Numerical Algorithms, sections 1.7 and 1.9 (cancellation, sample variance)",
        "Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 37, 1983",
    ),
)

_ROUNDED = "the difference was compared with that of the numbers before their cast, in FP64"


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        fmt = known_format(fact.dtype)
        if fmt is None or not fact.number("bits_lost") >= fmt.mantissa_bits + 1 - options["bits_left"]:
            return 0.0
        share = fact.number("wrong") / max(fact.count("of"), 1)
        return share if share >= options["wrong_share"] and has_effect(fact, options["effect"]) else 0.0

    def tell(group: Group) -> Finding:
        return _finding(view, group, options)

    def lasts(group: Group) -> bool:
        """Predictions come close to their targets late in a run; what cancels by design does so from the start."""
        done = sum(s.outcome == "done" and s.rank == group.worst.rank for s in scans(view))
        return not _rounded_before(group.worst) or (len(group.steps) > 1 and 2 * len(group.steps) >= done)

    seen = "no difference that cancels"
    return check_facts(view, ("cancellation",), guilty, tell, seen=seen, keep=lasts)


def _rounded_before(fact: Fact) -> bool:
    """Whether it is a difference of two numbers that were cast to half before."""
    return fact.data.get("rounded_before") is True


def _difference(view: RunView, group: Group, options: Options) -> Finding:
    """Of numbers that were rounded before they were subtracted."""
    fact = group.worst
    wrong, of, zeros = fact.count("wrong"), fact.count("of"), fact.count("zeros")
    share = percent(wrong / max(of, 1))
    message = (
        f"At step {fact.step}, {fact.op}{fact.line} {place_words(fact)} subtracts numbers that were cast to "
        f"{fact.dtype} before: {wrong:,} of {of:,} non-zero differences ({share}, limit "
        f"{percent(options['wrong_share'])}) are off by more than half, {zeros:,} are exactly zero, for instance "
        f"{fact.number('seen'):.4g} where the numbers before the cast give {fact.number('exact'):.4g}."
        f"{elsewhere_words(group)}"
    )
    return RULE.finding(
        confidence=0.9,
        title=f"a difference {place_words(fact)} is {fact.dtype} rounding only: {share} of its elements are "
        f"wrong{fact.line}",
        message=message,
        location=locate(view, group),
        evidence=evidence_of(group, {n: options[n] for n in ("bits_left", "wrong_share")}, _ROUNDED),
        prescriptions=(
            Prescription(
                title=f"subtract in FP32 and cast the difference{fact.line}: wrong elements {wrong:,} -> 0",
                change={"compute_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
                predicted={"wrong_elements": {"from": wrong, "to": 0}},
                snippet=f"difference = (a.float() - b.float()).to(torch.{fact.dtype})  # before either is rounded\n",
            ),
        ),
    )


def _finding(view: RunView, group: Group, options: Options) -> Finding:
    fact = group.worst
    if _rounded_before(fact):
        return _difference(view, group, options)
    fmt = known_format(fact.dtype)
    bits = fmt.mantissa_bits + 1 if fmt is not None else 0
    lost, wrong, of = min(fact.number("bits_lost"), bits), fact.count("wrong"), fact.count("of")
    op, source = fact.where("used_by")
    there = f" at {source.file}:{source.line}" if source is not None else ""
    share = percent(wrong / max(of, 1))
    message = (
        f"At step {fact.step}, {fact.op}{fact.line} {place_words(fact)} subtracts two moments that agree in "
        f"{lost:.0f} of {fact.dtype}'s {bits} bits (median; limit {bits - options['bits_left']:.0f}). After "
        f"{short_name(op)}{there}, {wrong:,} of {of:,} elements ({share}, limit {percent(options['wrong_share'])}) are "
        f"off by a quarter or more, for instance {fact.number('seen'):.4g} where FP64 gives "
        f"{fact.number('exact'):.4g}.{effect_words(fact, options['effect'])}{elsewhere_words(group)}"
    )
    why = "bits and error were measured against FP64 on the run's own numbers"
    confidence, reason = certainty(group, 0.95, why)
    return RULE.finding(
        confidence=confidence,
        title=f"a variance {place_words(fact)} cancels in {lost:.0f} of {bits} bits: {share} of what is made of it is "
        f"wrong{fact.line}",
        message=message,
        location=locate(view, group),
        evidence=evidence_of(
            group,
            {name: options[name] for name in ("bits_left", "wrong_share", "effect")},
            reason,
        ),
        prescriptions=(
            Prescription(
                title=f"centre before squaring{fact.line}: bits lost {lost:.0f} -> 0",
                change={"variance": {"from": "E[x*x] - E[x]^2", "to": "E[(x - E[x])^2]"}, "op": fact.op},
                predicted={"bits_lost": {"from": lost, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}},
                snippet=(
                    "mean = x.mean(-1, keepdim=True)\n"
                    "var = (x - mean).square().mean(-1, keepdim=True)  # or x.var(-1, correction=0, keepdim=True)\n"
                ),
            ),
        ),
    )


RULE = Rule(
    code="PD705",
    name="catastrophic-cancellation",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("bits_left", 3.0, "bits", "Significant bits that must be left.",
                   "Within three bits of the significand the leading digit of the difference is in doubt."),
        RuleOption("wrong_share", 0.5, "fraction",
                   "Share of the elements made of it that may be off by a quarter or more.",
                   "Chosen empirically: most of them; constant rows, whose variance is zero, are always lost.",
                   maximum=1.0),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
