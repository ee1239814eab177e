"""PD206: an op flushes its result to zero, and a later result is therefore finite but wrong."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.scan_effects import EFFECT, effect_words, wrong_results, wrong_share
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, short_name
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

PAGE = RulePage(
    finds="""
An op on a deep-scanned step (`record --deep-scan`) whose result is zero for at least a quarter of the elements that
are not zero in FP64: products, squares, exponentials, casts. The scan carries the exact values along in FP64. The
finding is about their consequence: finite, representable numbers that are off by more than half. Zeros without a
consequence are no finding: probabilities that only weigh other terms, squares below a larger epsilon, and ReLU, dropout
and masks, which are also zero in FP64. In the FP64 computation, a guard at the format's smallest number
(`clamp(min=torch.finfo(x.dtype).tiny)`) becomes FP64's. Wrong numbers are also no finding if they make up less than
`effect` of a sum, or if a later scan no longer shows them: weights that begin at zero underflow until they have grown.
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
Widen before the small numbers arise: `x.float()` before the square, `softmax(..., dtype=torch.float32)`, or a scale
applied first. Widening afterwards keeps the zero.
""",
    confidence="""
0.95: the scan recorded the op, counted its zeros and computed the exact values in FP64. 0.7 if only one scanned step
shows it, or if the scan could not follow it to the result that it feeds.
""",
    references=(
        "IEEE 754-2019, section 7.5 (underflow); FP16 rounds to zero at and below 2^-25",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 (arithmetic in FP32, storage in FP16)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code with such an underflow, from the deep scans."""
    return check_facts(
        view, ("underflow",), wrong_results(options), lambda g: _finding(g, options),
        seen="no underflow changed a result", flushes=lambda _: True,
    )  # fmt: skip


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    wrong, of, affected = fact.count("wrong"), fact.count("of"), fact.count("affected")
    op, there = fact.where("shown_by")
    share = percent(wrong_share(fact))
    return group.finding(
        RULE,
        title=f"{fact.short} flushes to zero {fact.place_words}, and {share} of the result of {short_name(op)} is "
        f"wrong{fact.line}",
        message=f"At step {fact.step}, {fact.op}{fact.line} {fact.place_words} flushed {affected:,} elements to zero "
        f"({fact.dtype}) that reach {fact.number('exact_amax'):.4g} in FP64. {wrong:,} of {of:,} elements ({share}, "
        f"limit {percent(options['wrong_share'])}) of the result of {short_name(op)}{there} are therefore off by more "
        f"than half: {fact.number('seen'):.4g} where FP64 gives {fact.number('exact'):.4g}, for "
        f"instance.{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=group.certainty(0.95, "the scan recorded the op and computed the exact values in FP64"),
        limits={n: options[n] for n in ("wrong_share", "effect")},
        prescription=_prescription(fact, affected, wrong),
    )


def _prescription(fact: Fact, affected: int, wrong: int) -> Prescription:
    narrow, least = known_format(fact.dtype), fact.number("exact_amin")
    predicted = {"flushed_elements": {"from": affected, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}}
    if narrow is not None and narrow.exponent_bits < FP32.exponent_bits and least >= FP32.min_normal:
        return Prescription(
            title=f"widen before `{fact.short}`{fact.own_line}: in FP32 the smallest of them, {least:.3g}, is a normal "
            f"number; flushed elements {affected:,} -> 0",
            change={"compute_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
            predicted=predicted,
            snippet="y = x.float().square().mean(-1, keepdim=True)  # widened before the small numbers arise\n",
        )
    return Prescription(
        title=f"scale up before `{fact.short}`{fact.own_line} and down after it: the smallest exact result is "
        f"{least:.3g}; flushed elements {affected:,} -> 0",
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
        fraction("wrong_share", 0.01, "Maximum share of a result's elements that are finite and off by more than half.",
                 "Chosen empirically: ten times as many as for an overflow, because small numbers add less."),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
