"""PD706: a cast that loses most of a tensor."""

from __future__ import annotations

from precdoctor.diagnosis.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.rows import known_format, text
from precdoctor.diagnosis.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.scans import Fact, Group, check_facts, elsewhere_words, evidence_of, locate, place_words
from precdoctor.diagnosis.telling import percent
from precdoctor.diagnosis.view import RunView

PAGE = RulePage(
    finds="""
Casts in the forward pass, on steps that were looked at op by op (`record --deep-scan`), of two kinds. Range: what the
cast flushes to zero, clips to the largest number or sends to infinity is most of the tensor, measured by magnitude:
sum |x - cast(x)| over sum |x|. A tail of tiny probabilities that is flushed weighs nothing and is no finding, nor is a
mask of the most negative number that becomes -Inf. Integers: positions, indices or counts that are cast to BF16 (exact
up to 256) or FP16 (up to 2048), or made in it by `arange`, so that distinct ones become the same number.
""",
    matters="""
A tensor that is zero after the cast takes no part in anything, and its gradient is as small. Positions that collide
make a model that cannot tell neighbours apart, from token 256 on.
""",
    example="""
    t = torch.arange(1000).to(torch.bfloat16)   # 1000 time steps, 507 different numbers
    w = (weights * 1e-9).half()                 # all zero
""",
    remedy="""
Scale before the cast and back after it, or keep the tensor in a format whose range holds it. Keep integers in an
integer type or in FP32 until after the sine, the embedding or the division.
""",
    confidence="""
0.95: every element was compared before and after.
""",
    references=(
        "IEEE 754-2019, section 4.3 (rounding); integers are exact up to 2 to the power of the significand's bits",
        "OCP 8-bit Floating Point Specification (OFP8), revision 1.0: E4M3 ends at 448",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        if "distinct_before" in fact.data:
            collided = _collided(fact)
            return collided if collided >= options["collided"] else 0.0
        lost = fact.number("lost")
        return lost if lost >= options["lost"] else 0.0

    def tell(group: Group) -> Finding:
        return _finding(view, group, options)

    return check_facts(view, ("cast",), guilty, tell, seen="no cast that loses most of a tensor")


def _collided(fact: Fact) -> float:
    return 1.0 - fact.count("distinct_after") / max(fact.count("distinct_before"), 1)


def _finding(view: RunView, group: Group, options: Options) -> Finding:
    fact = group.worst
    before, after = text(fact.data.get("from")), text(fact.data.get("to"))
    if "distinct_before" in fact.data:
        effect = f"{fact.count('distinct_before'):,} integers become {fact.count('distinct_after'):,} different numbers"
        measured = f"up to {fact.number('largest'):,.0f}, {percent(_collided(fact))} collide"
        limit, limits = percent(options["collided"]), {"collided": options["collided"]}
    else:
        effect = f"{percent(fact.number('lost'))} of its magnitude is lost"
        measured = (
            f"{fact.count('flushed'):,} of {fact.count('nonzero'):,} non-zero elements flushed to zero, "
            f"{fact.count('clipped'):,} clipped or overflowed, largest {fact.number('amax'):.4g}"
        )
        limit, limits = percent(options["lost"]), {"lost": options["lost"]}
    message = (
        f"At step {fact.step}, the cast of a tensor of {fact.count('numel'):,} elements from {before} to {after}"
        f"{fact.line} {place_words(fact)}: {effect} ({measured}; limit {limit}).{elsewhere_words(group)}"
    )
    return Finding(
        code="PD706",
        name="lossy-cast",
        severity=Severity.WARNING,
        confidence=0.95,
        title=f"cast from {before} to {after} {place_words(fact)}: {effect}{fact.line}",
        message=message,
        location=locate(view, group),
        evidence=evidence_of(group, limits, "every element was compared before and after"),
        prescriptions=(_prescription(fact, after),),
    )


def _prescription(fact: Fact, after: str) -> Prescription:
    if "distinct_before" in fact.data:
        whole = fact.count("distinct_before")
        return Prescription(
            title=f"keep the integers in FP32{fact.line}: different numbers {fact.count('distinct_after'):,} -> "
            f"{whole:,}",
            change={"cast": {"from": after, "to": "float32"}},
            predicted={"different_numbers": {"from": fact.count("distinct_after"), "to": whole}},
            snippet=f"angles = positions.float()[:, None] * frequencies  # cast sines and cosines to {after} instead\n",
        )
    fmt = known_format(after)
    scale = fmt.max / 4 / fact.number("amax") if fmt is not None and fact.number("amax") > 0 else 1.0
    return Prescription(
        title=f"scale by {scale:.3g} before the cast{fact.line} and back after it: largest element "
        f"{fact.number('amax'):.3g} -> {fact.number('amax') * scale:.3g}, magnitude lost "
        f"{percent(fact.number('lost'))} -> about 0 %",
        change={"scale_before_cast": scale, "to": after},
        predicted={"magnitude_lost": {"from": fact.number("lost"), "to": 0.0}},
        snippet=f"import torch\n\ny = (x * {scale!r}).to(torch.{after})  # divide by the scale after use\n",
    )


RULE = Rule(
    code="PD706",
    name="lossy-cast",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "lost",
            0.5,
            "fraction",
            "Share of a tensor's sum of magnitudes that a cast may lose.",
            "Half: most of it.",
            maximum=1.0,
        ),
        RuleOption(
            "collided",
            0.25,
            "fraction",
            "Share of distinct integers that may become equal to another one.",
            "Precdoctor's own: random integers below 1000 in batches of 64 stay below it; in BF16 512 positions reach "
            "it.",
            maximum=1.0,
        ),
    ),
    kinds=(),
    columns=(),
    check=check,
)
