"""PD701: a sum that is really accumulated in half precision."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.scan_effects import EFFECT, effect_words, has_effect
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

PAGE = RulePage(
    finds="""
Sums whose error shows that they were accumulated in BF16 or FP16, measured in deep scans (`record --deep-scan`). Two
kinds: a running total on one line (`total = total + x` or `- x` in a loop), which the scan adds up a second time in
FP64; and a reduction, which it runs again in FP64 on the same operands. Neither the name of an op nor the dtype of its
result counts, because most kernels accumulate in FP32 and round once: `sum`, `mean`, `softmax`, `layer_norm`,
`scatter_add` and matrix products of BF16 pass. On a CPU, `index_put(accumulate=True)` and the gradient of an embedding
do not. Cancellation inside a sum is no fault of its accumulation and does not count, nor does an error that ends as
less than `effect` of a larger sum. A total that is large beside its terms (a position, a state that is integrated)
counts by what is added to it: where `swamped` of that is lost and the result that it feeds is off by four times
`effect`.
""",
    matters="""
Once a running total is 2^8 times a term in BF16 (2^11 in FP16), adding the term changes nothing: a sum of ones stops
at 256, and 2048. Long sums come out a fraction of what they are, and the gradient of frequent tokens with them.
""",
    example="""
    total = torch.zeros(width, dtype=torch.bfloat16)
    for frame in frames:             # 1,000 of them
        total = total + frame        # stalls; half of the sum is lost
""",
    remedy="""
Keep the total in FP32 and round once at the end, or stack the terms and call `sum`, whose kernel does. An embedding
that is trained in BF16 on a CPU wants FP32 weights.
""",
    confidence="""
0.95: the error was measured against FP64 on the run's own numbers. 0.85 in the backward pass, where another device may
accumulate otherwise. 0.7 when only one scanned step shows it, or when it could not be followed to the result it feeds.
""",
    references=(
        "Higham, Accuracy and Stability of Numerical Algorithms, chapter 4 (a running sum errs by up to n u)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.3 (reductions in FP32)",
    ),
)
_REASON = "the error was measured against FP64 on the run's own numbers"


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        """Return the relative error of the sum, or the lost share of what was added; 0 below the limits."""
        if _is_swamped(fact, options):
            return fact.number("of_added")
        fmt, error = known_format(fact.dtype), fact.number("error")
        if fmt is None or not error >= options["error"] or not has_effect(fact, options["effect"]):
            return 0.0
        if fact.kind == "reduction":
            unit = 2.0 ** -(fmt.mantissa_bits + 1)
            return error if fact.number("error_of_magnitudes") >= options["roundings"] * unit else 0.0
        return error

    return check_facts(
        view, ("reduction", "total"), guilty, lambda g: _finding(g, options), seen="no sum accumulated in half"
    )


def _is_swamped(fact: Fact, options: Options) -> bool:
    """Return whether most of what was added to a total is lost, with a large effect on the result that it feeds.

    Four times the effect that training tolerates: if little is added, its loss cannot have that much.
    """
    return fact.number("of_added") >= options["swamped"] and fact.number("effect") >= 4.0 * options["effect"]


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    error, terms = fact.number("error"), fact.number("terms")
    fmt = known_format(fact.dtype)
    bits = fmt.mantissa_bits if fmt is not None else 0
    wide = error * 2.0 ** (bits - FP32.mantissa_bits)
    what = "the running total" if fact.kind == "total" else fact.short
    added = percent(fact.number("of_added")) if _is_swamped(fact, options) else ""
    beside = f" That is {added} of what was added (limit {percent(options['swamped'])})." if added else ""
    return group.finding(
        RULE,
        title=f"{what} {fact.place_words} is accumulated in {fact.dtype} and "
        f"{f'loses {added} of what is added' if added else f'{percent(error)} off'}{fact.line}",
        message=f"{fact.op_words} came out {percent(error)} off (L2, limit {percent(options['error'])}) against the "
        f"same {terms:,.0f} terms per sum added in FP64. One rounding to {fact.dtype} would be "
        f"{percent(2.0 ** -(bits + 1))}: it accumulates in "
        f"{fact.dtype}.{beside}{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=group.certainty(0.85 if fact.backward else 0.95, _REASON),
        limits={name: options[name] for name in ("error", "roundings", "swamped", "effect")},
        prescription=Prescription(
            title=f"accumulate in FP32{fact.own_line}: error {percent(error)} -> {percent(wide)}",
            change={"accumulate_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
            predicted={"relative_error": {"from": error, "to": wide}},
            snippet=_snippet(fact),
        ),
    )


def _snippet(fact: Fact) -> str:
    if fact.kind == "total":
        return (
            "import torch\n\n"
            "total = torch.zeros(shape, dtype=torch.float32)\n"
            "for term in terms:\n"
            "    total += term  # widened by type promotion\n"
            f"total = total.to(torch.{fact.dtype})  # rounded once\n"
        )
    if fact.short.startswith("embedding"):
        return "model.embedding.float()  # its gradient is then summed in FP32; cast what it returns\n"
    return f"import torch\n\ny = op(x.float()).to(torch.{fact.dtype})  # summed in FP32, rounded once\n"


RULE = Rule(
    code="PD701",
    name="reduction-in-half",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("error", 0.05, "fraction", "Relative error (L2) of a sum against FP64.",
                   "Chosen empirically: 25 roundings to BF16; ten times the rounding of 24 layers of residuals."),
        RuleOption("roundings", 0.25, "half ulps",
                   "Least error of a reduction beside the sum of its terms' magnitudes.",
                   "A sum accumulated in FP32 is thousands of times below, however much cancels in it."),
        fraction("swamped", 0.5, "Least share of what is added to a large total that is lost.",
                 "More is lost than is left."),
        EFFECT,
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
