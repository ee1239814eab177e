"""The effect of a scan fact's error on the results that it feeds: the shared option, limits and sentence."""

from __future__ import annotations

from collections.abc import Callable

from precdoctor.diagnosis.analyses.scans import Fact, short_name
from precdoctor.diagnosis.claims.rule import Options, fraction
from precdoctor.diagnosis.claims.words import percent

#: Option of all rules on scan facts: an error counts by its share of the result that it feeds.
EFFECT = fraction(
    "effect", 2.0**-8, "Least share that the error must make up of the result that it feeds.",
    "Half a unit in the last place of BF16: training tolerates that in the result of every op."
)  # fmt: skip


def wrong_share(fact: Fact) -> float:
    """Return the share of a result's elements that a hidden overflow or underflow makes wrong by more than half."""
    return fact.share("wrong", "of")


def has_effect(fact: Fact, limit: float) -> bool:
    """Return whether the error makes up at least ``limit`` of the result that it feeds; True if not measured."""
    return not fact.number("effect") < limit


def wrong_results(options: Options) -> Callable[[Fact], float]:
    """Return the ``badness`` of hidden overflows and underflows: the wrong share of a fact.

    0 below the option ``wrong_share``, or if its measured effect is below the option ``effect``.
    """

    def weight(fact: Fact) -> float:
        share = wrong_share(fact)
        return share if share >= options["wrong_share"] and has_effect(fact, options["effect"]) else 0.0

    return weight


def effect_words(fact: Fact, limit: float) -> str:
    """Return the effect of an error as a sentence; empty if it was not measured."""
    op, there = fact.where("fed")
    if not op:
        return ""
    share = percent(fact.number("effect"))
    return f" The error makes up {share} of the result of {short_name(op)}{there} (limit {percent(limit)})."
