"""Every rule, in triage order, and how a user names them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from precdoctor.diagnosis.rule import Rule
from precdoctor.diagnosis.rules import (
    activation_gradient_underflow,
    bad_input_batch,
    fp8_saturation,
    lost_weight_updates,
    loss_scale_collapse,
    nonfinite_loss,
    nonfinite_origin_backward,
    nonfinite_origin_forward,
    nonfinite_weights,
)
from precdoctor.errors import UsageError

#: In triage order (data, learning rate, loss scale, forward, loss, backward, optimizer), then by code.
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            nonfinite_origin_forward.RULE,
            nonfinite_origin_backward.RULE,
            nonfinite_loss.RULE,
            bad_input_batch.RULE,
            nonfinite_weights.RULE,
            activation_gradient_underflow.RULE,
            loss_scale_collapse.RULE,
            fp8_saturation.RULE,
            lost_weight_updates.RULE,
        ),
        key=lambda rule: (rule.triage, rule.code),
    )
)


def find_rule(name: str) -> Rule:
    """The rule with this code or kebab-case name, in any letter case.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    wanted = name.strip().lower()
    for rule in RULES:
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise UsageError(f"no rule is called {name!r}{nearest(name, [n for r in RULES for n in (r.code, r.name)])}")


def select_rules(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules in ``select`` (all when empty) without those in ``ignore``; codes, names or code prefixes (``PD1``).

    Raises:
        UsageError: an entry matches no rule.
    """
    chosen = _matching(select) or {r.code for r in RULES}
    dropped = _matching(ignore)
    return tuple(r for r in RULES if r.code in chosen and r.code not in dropped)


def _matching(names: Iterable[str]) -> set[str]:
    codes: set[str] = set()
    for name in names:
        prefix = name.strip().upper()
        by_prefix = {r.code for r in RULES if prefix.startswith("PD") and r.code.startswith(prefix)}
        codes |= by_prefix or {find_rule(name).code}
    return codes


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or nothing."""
    names = list(known)
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(word.strip().lower(), list(lowered), n=1)
    return f"; did you mean {lowered[close[0]]!r}?" if close else f"; known: {', '.join(sorted(names))}"
