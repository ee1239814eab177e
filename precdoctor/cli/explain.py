"""``precdoctor explain``: the page of a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from precdoctor.comparison.regressions import Regression
    from precdoctor.diagnosis.claims.rule import Rule

EXAMPLES = """\b
Examples:
  precdoctor explain
  precdoctor explain PD201
  precdoctor explain lost-weight-updates"""


def explain(
    code: Annotated[
        str | None, typer.Argument(help="Code or name of a rule; default: list them.", metavar="[CODE]")
    ] = None,
) -> int:
    """Explain a rule.

    What it finds, why it matters, what to do, its options. Without a code, list all rules.
    """
    from precdoctor.comparison.compare import FIRST_DIFFERENCE
    from precdoctor.comparison.leading import INDICATORS
    from precdoctor.comparison.regressions import REGRESSIONS
    from precdoctor.diagnosis import registry
    from precdoctor.reporting.console import make_console
    from precdoctor.reporting.rule_view import print_page, print_rules

    console = make_console()
    if code is None:
        print_rules(registry.FAMILIES, console)
        return 0
    entries: list[Rule | Regression] = [*registry.RULES, *REGRESSIONS, FIRST_DIFFERENCE, *INDICATORS]
    print_page(registry.find(code, entries), console)
    return 0
