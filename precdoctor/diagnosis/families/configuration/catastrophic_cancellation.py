"""PD705: a variance taken as the difference of two large moments."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.scan_effects import EFFECT, effect_words, has_effect, wrong_share
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, short_name
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32, FP64

PAGE = RulePage(
    finds="""
Variances and covariances computed as E[x*x] - E[x]*E[x], in deep scans (`record --deep-scan`), where the two moments
agree in nearly all of their bits. The scan computes the moments in FP64 as well and judges the next result (`rsqrt`,
`sqrt`, a division), because an epsilon larger than the error covers it. Bits lost are log2 of the larger moment over
the difference, median over elements. Other differences are not reported: `x - x.mean()` on the numbers themselves is
exact where it cancels, and so are converging predictions, log-probabilities of two models, and straight-through
estimators. Nor is a difference that ends as less than `effect` of a sum. Where the error makes up `strong_effect` of
the result that it feeds, `few` of the elements are enough: one channel of eight can decide.

In loss code the difference of two tensors that were cast to half also counts, if most of its elements are off by more
than half against the numbers before the cast, on two scanned steps or more and on half of all. So does a constant minus
what an op has just made (`1 - sigmoid(x)`, `exp(x) - 1`), against the same op in FP64. In a module it counts if both
tensors are data or constants (time stamps, years and their mean), also in one column of a matrix. Data is compared
with what it was before its first rounding (a cast, a running sum of intervals, a 16-bit buffer of rewards, time stamps
that were cast to FP32); there `noise` of the difference in all (L2) is enough. FP32 data above 2^24 that no
scan saw in a wider format (Unix times) counts if `wrong_share` of its differences are one ulp or none.

Differences of running sums in half (`cumsum`, for window means, segment sums, box sums) are compared with those of the
same sums in FP64, with a gradient or without. The rounding grows with the sum, so those of the larger half of the sums
are judged apart, by `noise`.

Of expanded squares of data (`x^2 - 2 x y + y^2` on coordinates far from zero) only the near pairs are wrong. They count
if `wrong_share` of the rows have one, and `strong_effect` of what it feeds is their error.
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
0.95: the bits lost and the error were measured against FP64 on the run's own numbers. 0.7 when only one scanned step
shows it, or when it could not be followed to the result it feeds.
""",
    references=(
        "Higham, Accuracy and Stability of Numerical Algorithms, sections 1.7 and 1.9 (cancellation, sample variance)",
        "Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, The American Statistician 37, 1983",
    ),
)

_MEASURED = "bits and error were measured against FP64 on the run's own numbers"
_ROUNDED = "the difference was compared with that of the numbers before their cast, in FP64"
_SUMMED = "the differences were compared with those of the same sums in FP64"


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        """Return the share of wrong elements, or rows, or the noise, whichever exceeds its limit; 0 if none does."""
        if "ulp" in fact.data:
            return wrong_share(fact) if wrong_share(fact) >= options["wrong_share"] else 0.0
        if fact.flag("of_data") and fact.number("noise") >= options["noise"]:
            return fact.number("noise")
        if fact.flag("running_sum"):
            matters = fact.number("noise") >= options["noise"] and has_effect(fact, options["effect"])
            return fact.number("noise") if matters else 0.0
        fmt = known_format(_rounding_dtype(fact))
        if fmt is None or not fact.number("bits_lost") >= fmt.mantissa_bits + 1 - options["bits_left"]:
            return 0.0
        strong = fact.number("effect") >= options["strong_effect"]
        least = options["few"] if strong else options["wrong_share"]
        if strong and _wrong_row_share(fact) >= options["wrong_share"]:
            return _wrong_row_share(fact)
        return wrong_share(fact) if wrong_share(fact) >= least and has_effect(fact, options["effect"]) else 0.0

    def lasts(group: Group) -> bool:
        """Return whether rounded numbers cancel by design, from the start; True for any other cancellation.

        Predictions come close to their targets only late in a run.
        """
        return not group.worst.flag("rounded_before") or group.stands

    return check_facts(
        view, ("cancellation",), guilty, lambda g: _finding(g, options), seen="no difference that cancels",
        keep=lasts,
    )  # fmt: skip


def _wrong_row_share(fact: Fact) -> float:
    """Return the share of the rows of expanded distances with at least one wrong element."""
    return fact.share("rows_wrong", "rows")


def _rounding_dtype(fact: Fact) -> str:
    """Return the dtype that rounded: of a difference in FP32 that of its operands before they were widened."""
    return text(fact.data.get("dtype")) or fact.dtype


def _rounded_finding(group: Group, options: Options) -> Finding:
    """Return the finding about numbers that were rounded before they were subtracted."""
    fact = group.worst
    if fact.flag("running_sum"):
        return _running_sum_finding(group, options)
    wrong, of, zeros = fact.count("wrong"), fact.count("of"), fact.count("zeros")
    dtype, share, noise = _rounding_dtype(fact), percent(wrong_share(fact)), fact.number("noise")
    wide, method = (FP64, "double") if dtype == FP32.dtype else (FP32, "float")
    whole = fact.flag("of_data") and noise >= options["noise"]
    error = f" The error of all is {percent(noise)} of them (L2, limit {percent(options['noise'])})." if whole else ""
    least = options["wrong_share"] if wrong >= options["wrong_share"] * of else options["few"]
    limit = "" if whole else f", limit {percent(least)}"
    if not whole and wrong < least * of:
        limit = f", in {percent(_wrong_row_share(fact))} of the rows, limit {percent(options['wrong_share'])}"
    what = (
        f"{percent(noise)} noise" if whole and wrong < of / 2 else f"rounding only: {share} of its elements are wrong"
    )
    return group.finding(
        RULE,
        title=f"a difference {fact.place_words} is {dtype} {what}{fact.line}",
        message=f"{fact.op_words} subtracts numbers that had been rounded to {dtype}. {wrong:,} of {of:,} non-zero "
        f"differences ({share}{limit}) are off by more than half, {zeros:,} are exactly zero, for instance "
        f"{fact.number('seen'):.4g} where the numbers before the cast give "
        f"{fact.number('exact'):.4g}.{error}{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=(0.9, _ROUNDED),
        limits={name: options[name] for name in ("bits_left", "wrong_share", "noise")},
        prescription=Prescription(
            title=f"subtract in {wide.name} and cast the difference{fact.own_line}: wrong elements {wrong:,} -> 0",
            change={"compute_dtype": {"from": dtype, "to": wide.dtype}, "op": fact.op},
            predicted={"wrong_elements": {"from": wrong, "to": 0}},
            snippet=f"difference = (a.{method}() - b.{method}()).to(torch.{dtype})  # before either is rounded\n",
        ),
    )


def _running_sum_finding(group: Group, options: Options) -> Finding:
    """Return the finding about differences of running sums, which are coarse where the sums are large."""
    fact = group.worst
    wrong, of, largest, dtype = fact.count("wrong"), fact.count("of"), fact.number("largest"), _rounding_dtype(fact)
    noise = percent(fact.number("noise"))
    return group.finding(
        RULE,
        title=f"a difference of running sums {fact.place_words} is {noise} noise: {dtype} holds the sums, up to "
        f"{largest:.4g}{fact.line}",
        message=f"{fact.op_words} subtracts running sums that {dtype} rounds. The differences of the larger half of "
        f"them, up to {largest:.4g}, have an error of {noise} (L2, limit {percent(options['noise'])}): {wrong:,} of "
        f"{of:,} are off by an eighth or more, for instance {fact.number('seen'):.4g} where FP64 gives "
        f"{fact.number('exact'):.4g}.{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=(0.9, _SUMMED),
        limits={name: options[name] for name in ("noise", "effect")},
        prescription=Prescription(
            title=f"keep the running sum in FP32 until it is subtracted{fact.own_line}: wrong elements {wrong:,} -> 0",
            change={"compute_dtype": {"from": dtype, "to": FP32.dtype}, "op": fact.op},
            predicted={"wrong_elements": {"from": wrong, "to": 0}},
            snippet="total = x.float().cumsum(1)  # not in half\n"
            "means = ((total[:, width:] - total[:, :-width]) / width).to(x.dtype)\n",
        ),
    )


def _coarse_finding(group: Group, options: Options) -> Finding:
    """Return the finding about FP32 data, never seen in a wider format, whose differences are an ulp or zero."""
    fact = group.worst
    wrong, of, ulp, largest = (fact.number(name) for name in ("wrong", "of", "ulp", "largest"))
    share, near = percent(wrong_share(fact)), f"{largest:.4g}"
    return group.finding(
        RULE,
        title=f"a difference {fact.place_words} is float32 rounding only: numbers near {near} are {ulp:g} apart"
        f"{fact.line}",
        message=f"{fact.op_words} subtracts float32 numbers up to {near}, which are {ulp:g} apart there. {wrong:,.0f} "
        f"of {of:,.0f} differences ({share}, limit {percent(options['wrong_share'])}) are {ulp:g} or zero, "
        f"{fact.count('zeros'):,} of them zero. Each number was rounded by up to half of that when it became float32, "
        f"so the differences say nothing.{group.elsewhere_words}",
        certain=(0.8, "the differences were counted; what the numbers were before their cast is not known"),
        limits={"wrong_share": options["wrong_share"]},
        prescription=Prescription(
            title=f"keep the numbers as integers or in FP64 until they are subtracted{fact.own_line}: numbers {ulp:g} "
            "apart -> at most 1",
            change={"compute_dtype": {"from": "float32", "to": "float64"}, "op": fact.op},
            predicted={"spacing": {"from": ulp, "to": 1.0}},
            snippet="stamps = torch.tensor(stamps, dtype=torch.float64)  # not float32\n"
            "gaps = (stamps[:, 1:] - stamps[:, :-1]).float()\n",
        ),
    )


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    if "ulp" in fact.data:
        return _coarse_finding(group, options)
    if fact.flag("rounded_before"):
        return _rounded_finding(group, options)
    fmt = known_format(fact.dtype)
    bits = fmt.mantissa_bits + 1 if fmt is not None else 0
    lost, wrong, of = min(fact.number("bits_lost"), bits), fact.count("wrong"), fact.count("of")
    op, there = fact.where("used_by")
    share = percent(wrong_share(fact))
    return group.finding(
        RULE,
        title=f"a variance {fact.place_words} cancels in {lost:.0f} of {bits} bits: {share} of the results made of it "
        f"are wrong{fact.line}",
        message=f"{fact.op_words} subtracts two moments that agree in {lost:.0f} of {fact.dtype}'s {bits} bits "
        f"(median; limit {bits - options['bits_left']:.0f}). After {short_name(op)}{there}, {wrong:,} of {of:,} "
        f"elements ({share}, limit {percent(options['wrong_share'])}) are off by a quarter or more, for instance "
        f"{fact.number('seen'):.4g} where FP64 gives "
        f"{fact.number('exact'):.4g}.{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=group.certainty(0.95, _MEASURED),
        limits={name: options[name] for name in ("bits_left", "wrong_share", "effect")},
        prescription=Prescription(
            title=f"centre before squaring{fact.own_line}: bits lost {lost:.0f} -> 0",
            change={"variance": {"from": "E[x*x] - E[x]^2", "to": "E[(x - E[x])^2]"}, "op": fact.op},
            predicted={"bits_lost": {"from": lost, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}},
            snippet=(
                "mean = x.mean(-1, keepdim=True)\n"
                "var = (x - mean).square().mean(-1, keepdim=True)  # or x.var(-1, correction=0, keepdim=True)\n"
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
        RuleOption("bits_left", 3.0, "bits", "Least number of significant bits that must be left.",
                   "Within three bits of the significand the leading digit of the difference is in doubt."),
        fraction("wrong_share", 0.5,
                 "Least share of the elements of the next result that are off by a quarter or more.",
                 "Chosen empirically: most of them; constant rows, whose variance is zero, are always lost."),
        fraction("strong_effect", 2.0**-4, "Error in the result that it feeds; from here on few elements do.",
                 "Sixteen times what training tolerates: the result keeps four bits."),
        fraction("few", 0.1, "Least share of wrong elements with such an effect.",
                 "Chosen empirically: one channel of ten."),
        fraction("noise", 0.125, "Least error of differences of rounded data or of running sums (L2).",
                 "No format of eight bits rounds as coarsely: E5M2 errs by at most 12.5 %."),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
