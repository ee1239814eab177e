"""All rules in triage order, and the selection of rules by code, name or prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Protocol, TypeVar

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families import configuration, fp8, growth, loss_scaling, nonfinite, underflow, updates
from precdoctor.errors import UsageError, did_you_mean


def rules_of(family: ModuleType) -> tuple[Rule, ...]:
    """Return the ``RULE`` of every module of a family that has one, by code."""
    modules = (import_module(f"{family.__name__}.{module.name}") for module in iter_modules(family.__path__))
    return tuple(sorted((m.RULE for m in modules if hasattr(m, "RULE")), key=lambda rule: rule.code))


#: The families in the order of the documentation: title, and rules sorted by code.
FAMILIES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("NaN and Inf", rules_of(nonfinite)),
    ("Values that become zero", rules_of(underflow)),
    ("The loss scale", rules_of(loss_scaling)),
    ("FP8", rules_of(fp8)),
    ("Updates, and state between steps", rules_of(updates)),
    ("Growth", rules_of(growth)),
    ("Ops, casts, replicas", rules_of(configuration)),
)
#: In triage order (data, learning rate, loss scale, forward, loss, backward, optimizer), then by code.
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for _, rules in FAMILIES for rule in rules), key=lambda rule: (rule.triage, rule.code))
)
#: ``{code: {code of a finding it may explain: required relation}}``; see :mod:`.claims.relations`.
RELATIONS = {rule.code: rule.explains for rule in RULES}


class Named(Protocol):
    """Anything a user selects by code or name: a rule, or a regression the gate looks for."""

    @property
    def code(self) -> str: ...

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


def find(name: str, known: Sequence[NamedT]) -> NamedT:
    """Return the rule with this code or kebab-case name, in any letter case.

    Raises:
        UsageError: no rule has it; the message suggests the nearest.
    """
    wanted = name.strip().lower()
    for rule in known:
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise UsageError(f"no rule is called {name!r}{_suggestion(wanted, known)}")


def _suggestion(wanted: str, known: Sequence[Named]) -> str:
    """Return the end of the error message for an unknown rule: the suggested code or name.

    Codes are suggested by common prefix only, because an unrelated code may be one digit away. Names are suggested by
    spelling.
    """
    longer = [r.code for r in known if wanted.startswith("pd") and r.code.lower().startswith(wanted)]
    within = [r.code for r in known if r.code.lower() in wanted]
    if len(longer) > 1:
        return f"; {min(longer)} to {max(longer)} begin like this, name one"
    if within or longer:
        return f"; did you mean {(within or longer)[0]!r}?"
    return did_you_mean(wanted, [r.name for r in known]) or "; `precdoctor explain` lists the rules"


def select(known: Sequence[NamedT], wanted: Iterable[str] = (), ignored: Iterable[str] = ()) -> tuple[NamedT, ...]:
    """Return the ``wanted`` rules (all if empty) minus the ``ignored`` ones; codes, names or code prefixes (``PD1``).

    Raises:
        UsageError: an entry matches nothing.
    """
    chosen = _matching_codes(wanted, known) or {r.code for r in known}
    dropped = _matching_codes(ignored, known)
    return tuple(r for r in known if r.code in chosen and r.code not in dropped)


def select_rules(wanted: Iterable[str] = (), ignored: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Apply :func:`select` to the rules of a diagnosis.

    Raises:
        UsageError: an entry matches no rule.
    """
    return select(RULES, wanted, ignored)


def _matching_codes(names: Iterable[str], known: Sequence[NamedT]) -> set[str]:
    codes: set[str] = set()
    for name in names:
        prefix = name.strip().upper()
        by_prefix = {r.code for r in known if prefix.startswith("PD") and r.code.startswith(prefix)}
        codes |= by_prefix or {find(name, known).code}
    return codes


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or the list of all known words if none is similar."""
    names = list(known)
    return did_you_mean(word, names) or f"; known: {', '.join(sorted(names))}"
