"""PD107: an overflow inside a module, hidden by a later op, so that the module's result is finite and wrong."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.scan_effects import EFFECT, effect_words, wrong_results, wrong_share
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, short_name
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

PAGE = RulePage(
    finds="""
An op that makes an infinity or a NaN of finite operands where FP64 would not, inside a module with finite outputs. A
later op (`rsqrt`, a division, `nan_to_num`, a clamp) has turned that value into an ordinary number. A deep scan
(`record --deep-scan`) measures it: from the overflow on it computes the right values in FP64, and counts the finite
elements that differ from them by more than half. Results that are right are no finding, whatever was infinite on the
way: masks of -Inf, `where` around a branch that is not taken, `tanh` and `sigmoid` of an overflow, a clamp below the
format's largest number, `1 / (1 + exp(-x))`. Wrong numbers do not count if they make up less than `effect` of a sum.

If the wrong number is a loss of 0, weights without a gradient (PD203) are its consequence.
""",
    matters="""
Loss, gradients and module outputs are all finite, so training goes on without an error. An infinite normaliser
multiplies its rows by zero: it switches the layer off for exactly the largest inputs.
""",
    example="""
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)  # FP16: 300 * 300 is Inf, and rsqrt(Inf) is 0
    return x * scale.detach()                                  # 0 instead of about 1
""",
    remedy="""
Do this arithmetic in FP32 (`x.float()` before the square), or divide by the largest magnitude before squaring and
multiply by it afterwards. If it already runs in FP32, rescale, or use the fused function that does (`F.rms_norm`,
`F.normalize`, `torch.linalg.vector_norm`, `logsumexp`).
""",
    confidence="""
0.95: the scan counted the op's operands and result, and computed the right values in FP64. 0.7 if only one scanned step
shows it, or if the scan could not follow it to the result that it feeds.
""",
    references=(
        "IEEE 754-2019, section 7.4 (overflow) and section 6.1 (arithmetic with infinities)",
        "Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467 (the statistics in FP32)",
    ),
)
#: Ops that take the dtype of their result as an argument; squares and the products that may be one.
_SUMS, _PRODUCTS = frozenset(("sum", "mean", "cumsum", "prod")), frozenset(("mul", "pow", "square"))
_REASON = "the scan computed the right values of the op in FP64"


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code with such an overflow, from the deep scans."""
    return check_facts(
        view, ("overflow",), wrong_results(options), lambda g: _finding(g, options),
        seen="no overflow changed a result",
    )  # fmt: skip


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    wrong, of, affected = fact.count("wrong"), fact.count("of"), fact.count("affected")
    shown, _ = fact.where("shown_by")
    hidden, there = fact.where("hidden_by")
    hiding = short_name(hidden or shown)
    seen, exact, share = fact.number("seen"), fact.number("exact"), percent(wrong_share(fact))
    return group.finding(
        RULE,
        title=f"{fact.short} overflows {fact.place_words} and {hiding} hides it: {share} of "
        f"the result is wrong{fact.line}",
        message=f"At step {fact.step}, {fact.op}{fact.line} {fact.place_words} made {affected:,} non-finite elements "
        f"({fact.dtype}) where FP64 gives up to {fact.number('exact_amax'):.4g}. {hiding}{there} turned them into "
        f"finite numbers. After {short_name(shown)}, {wrong:,} of {of:,} elements ({share}, limit "
        f"{percent(options['wrong_share'])}) are wrong by more than half, for instance {seen:.4g} where FP64 gives "
        f"{exact:.4g}. Neither the module's outputs nor the loss show "
        f"it.{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=group.certainty(0.95, _REASON),
        limits={n: options[n] for n in ("wrong_share", "effect")},
        prescription=_prescription(fact, affected, wrong),
    )


def _prescription(fact: Fact, affected: int, wrong: int) -> Prescription:
    narrow, reach = known_format(fact.dtype), fact.number("exact_amax")
    predicted = {"nonfinite_elements": {"from": affected, "to": 0}, "wrong_elements": {"from": wrong, "to": 0}}
    if narrow is not None and narrow.max < reach <= FP32.max:
        return Prescription(
            title=f"compute `{fact.short}`{fact.own_line} in FP32: {reach:.4g} is {FP32.headroom(reach):.0f} binades "
            f"below its end; non-finite elements {affected:,} -> 0",
            change={"compute_dtype": {"from": fact.dtype, "to": "float32"}, "op": fact.op},
            predicted=predicted,
            snippet=_widened(fact.short),
        )
    return Prescription(
        title=f"scale before `{fact.short}`{fact.own_line}: its exact result reaches {reach:.4g}; non-finite elements "
        f"{affected:,} -> 0",
        change={"scale_before": fact.op},
        predicted=predicted,
        snippet=(
            "largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)\n"
            "norm = largest * (x / largest).square().sum(-1, keepdim=True).sqrt()  # no square leaves the range\n"
        ),
    )


def _widened(op: str) -> str:
    """Lines that compute an op in FP32."""
    if op in _SUMS:
        return f"y = x.{op}(dtype=torch.float32)  # the result stays in FP32, and what reads it\n"
    if op in _PRODUCTS:
        return "y = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)  # widen first\n"
    return f"y = {op}(x.float())  # each tensor that {op} reads; the result stays in FP32, and what reads it\n"


def makes_loss_zero(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is about weights without a gradient under a loss of 0, which ``cause`` made 0."""
    return effect.evidence.get("loss_is_zero") is True and cause.evidence.get("seen") == 0.0


RULE = Rule(
    code="PD107",
    name="swallowed-nonfinite",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        fraction(
            "wrong_share", 0.001, "Share of a result's elements that may be wrong by more than half.",
            "Chosen empirically: one row in a thousand; a single element may be an unused edge."
        ),
        EFFECT,
    ),
    sampled_steps=False,
    explains=when(makes_loss_zero, "PD203"),
    check=check,
)  # fmt: skip
