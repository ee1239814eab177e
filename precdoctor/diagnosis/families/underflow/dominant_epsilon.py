"""PD207: an epsilon that is larger than most of the numbers it guards against zero, so that it decides the result."""

from __future__ import annotations

from statistics import median

from precdoctor.diagnosis.analyses.scan_effects import effect_words, has_effect, wrong_share
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, is_optimizers, short_name
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
An epsilon, or the bound of a clamp, that is larger than most of the numbers it protects from zero: `rsqrt(var + eps)`,
`x / (norm + eps)`, `1 / p.clamp(min=eps)`, `log(p + eps)`, `m / (v.sqrt() + eps)`, and the epsilon inside of layer,
group, batch and RMS normalisation. A deep scan (`record --deep-scan`) runs the op that reads the guarded number again
in FP64 without the constant. At least `wrong_share` of its results must be off by more than half, on two scanned steps
or more and on half of all. In a module or a loss the error must also make up `effect` of the result that it ends in;
where it makes up `large_effect`, a quarter of wrong results is enough.
Numbers that are exactly zero do not count, and neither do logarithms that are multiplied by zero. In the optimizer's
code only a constant beside a root counts, as Adam's, if the median root is `damping` times smaller; the damping of a
curvature (K-FAC, natural gradient) is meant to decide. So is Yogi's 1e-3 at its rate of 0.01: without it, a step would
be as long as `brisk` of the weights or longer. PD503 covers the epsilon of torch's own Adam.
""",
    matters="""
The constant is meant for the one number in a million that is zero. Where it decides for most of them, the operation is
another one: a normalisation that only scales, a quotient that does not depend on its denominator, a loss that is the
same for all samples. Underflowed products end there without a trace.
""",
    example="""
    decay = gates.cumprod(1)                    # 1e-20 after 60 steps
    return decay * (x / decay.clamp(min=1e-12)).cumsum(1)
""",
    remedy="""
Bring the numbers to order one before the guard (scale the input, subtract logarithms), or make the constant smaller
than the smallest number that matters: the square root of it in front of a square root. FP32 holds 1e-30, FP16 nothing
below 6e-8.
""",
    confidence="""
0.9: the result was computed again in FP64 on the same numbers. 0.7 if it could not be followed to the result that it
feeds.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, section 2 (eps against the root of the second moment)",
        "Higham, Accuracy and Stability of Numerical Algorithms, section 1.12 (guards that change the problem)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code with such an epsilon, from the deep scans."""

    def guilty(fact: Fact) -> float:
        """The share of wrong results; 0 below the limits."""
        share = wrong_share(fact)
        most = share >= options["wrong_share"] or fact.number("effect") >= options["large_effect"]
        if fact.phase == "optimizer" and fact.number("median") * options["damping"] > fact.number("constant"):
            return 0.0
        return share if most and has_effect(fact, options["effect"]) and not is_optimizers(fact) else 0.0

    return check_facts(
        view, ("floor",), guilty, lambda g: _finding(g, options), seen="no epsilon that decides",
        keep=lambda g: g.stands and not (g.worst.phase == "optimizer" and _is_meant(view, g, options["brisk"])),
    )  # fmt: skip


def _is_meant(view: RunView, group: Group, brisk: float) -> bool:
    """Return whether the learning rate only suits an optimizer whose epsilon decides.

    Without the epsilon a step moves each element by about the learning rate: at least ``brisk`` of the RMS of the
    weights, in the median of the matrices.
    """
    process = group.worst.process
    made = [facts for step in group.steps if (facts := view.step_facts(process, step)) is not None]
    rate = max((f.lr for f in made if f.lr is not None), default=0.0)
    rows = view.rows(process, group.worst.step)
    sizes = [r.rms for r in rows if r.kind == "weight" and len(r.shape) > 1 and r.rms]
    return bool(sizes) and rate >= brisk * median(sizes)


def _finding(group: Group, options: Options) -> Finding:
    fact = group.worst
    constant, middle = fact.number("constant"), fact.number("median")
    op, there = fact.where("read_by")
    share, decided = percent(wrong_share(fact)), fact.share("decided", "nonzero")
    instance = f", for instance {fact.number('seen'):.4g} instead of {fact.number('exact'):.4g}"
    limit = f"limit {percent(options['wrong_share'])}"
    if wrong_share(fact) < options["wrong_share"]:
        limit += f", or {percent(options['large_effect'])} of what they feed"
    smaller = min(middle / 64, constant / 1024)
    sizes = f"numbers of {middle:.3g}" if middle < constant else "numbers of all sizes"
    return group.finding(
        RULE,
        title=f"{constant:.3g} decides {share} of the results {fact.place_words}: it guards {sizes}{fact.line}",
        message=f"{fact.op_words} guards numbers of {middle:.3g} (median) with {constant:.3g}: {percent(decided)} of "
        f"those that are not zero are smaller. Without the constant, {fact.count('wrong'):,} of {fact.count('of'):,} "
        f"results of {short_name(op) if op else fact.short}{there} ({share}, {limit}) differ by more than half"
        f"{instance if 'exact' in fact.data else ''}.{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=group.certainty(0.9, "the op was run again in FP64 on the same numbers without the constant"),
        limits={n: options[n] for n in ("wrong_share", "effect", "large_effect")},
        prescription=Prescription(
            title=f"scale the numbers up, or guard with less{fact.own_line}: {constant:.3g} -> {smaller:.2g}; wrong "
            f"results {share} -> 0 %",
            change={"epsilon": {"from": constant, "to": smaller}, "op": fact.op},
            predicted={"wrong_share": {"from": wrong_share(fact), "to": 0.0}},
            snippet=f"eps = {smaller:.2g}  # was {constant:.3g}, above much of what it guards\n",
        ),
    )


RULE = Rule(
    code="PD207",
    name="dominant-epsilon",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        fraction("wrong_share", 0.5, "Least share of the results that the constant changes by half.",
                 "Most of them: a guard is for the exception."),
        fraction("effect", 1.0 / 32, "Least share that the error must make up of what it feeds.",
                 "Chosen empirically: biases dilute what a layer loses to a few percent of the logits."),
        fraction("large_effect", 0.25, "Share of what it feeds from which fewer wrong results count.",
                 "A quarter of a loss is no exception, however few elements it comes from."),
        RuleOption("damping", 8.0, "times", "How far below an optimizer's constant the median must be.",
                   "As in PD503: a ninth of a step is worth a change, a half is not.", 1.0),
        RuleOption("brisk", 0.1, "learning rate / RMS of weight",
                   "Steps without an optimizer's constant that are this long were not intended.",
                   "Chosen empirically: updates of small healthy networks at brisk rates reach 0.1."),
    ),
    settles=True,
    sampled_steps=False,
    explains=when(same_module, "PD201", "PD203", "PD204", "PD208"),
    check=check,
)  # fmt: skip
