"""What ``record --apply`` changed, and whether it did what was predicted: for a person, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.comparison.predictions import Applied, Outcome
from precdoctor.diagnosis.claims.finding import jsonable
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.prescriptions.file import effect_as_dict
from precdoctor.reporting.tables import folded, right, table
from precdoctor.reporting.text import clean

_VERDICTS = {True: ("came true", "pd.good"), False: ("missed", "pd.bad"), None: ("not measured", "pd.near")}


def print_applied(applied: Applied, console: Console) -> None:
    """The changes one per line, then a table of predicted against measured."""
    console.print("\nB was recorded with --apply:")
    if applied.problem:
        console.print(Text(f"  its own account of it cannot be read: {clean(applied.problem)}", "pd.near"))
    for line in applied.done:
        console.print(Padding(Text(clean(line, 200)), (0, 0, 0, 2)))
    if not applied.outcomes:
        return
    shown_table = table(*folded("predicted effect"), *right("A", "predicted", "measured in B", ""))
    for outcome in applied.outcomes:
        words, style = _VERDICTS[outcome.came_true]
        cells = (outcome.before, outcome.effect.after, outcome.measured)
        shown_table.add_row(subject_of(outcome), *(shown(outcome, v) for v in cells), Text(words, style))
    console.print(Padding(shown_table, (0, 0, 0, 2)))


def subject_of(outcome: Outcome) -> str:
    """``PD201 gradient elements flushed to zero, blocks.3.mlp grad_output``."""
    scope = outcome.effect.scope
    place = " ".join(p for p in (".".join(filter(None, (scope.module, scope.name))), scope.kind) if p)
    return clean(f"{outcome.code} {outcome.effect.measure.doc}" + (f", {place}" if place else ""), 120)


def shown(outcome: Outcome, value: float | None) -> str:
    """A value in the measure's unit."""
    if value is None:
        return "-"
    unit = outcome.effect.measure.unit
    if unit == "share":
        return percent(value)
    return plural(int(value), "step") if unit == "steps" else f"{value:.3g}"


def applied_section(applied: Applied) -> dict[str, Any]:
    """The ``applied`` object under ``compare`` in the JSON report."""
    return {
        "changes": [{"code": p.code, **c.as_dict()} for p in applied.prescriptions for c in p.changes],
        "done": list(applied.done),
        "problem": applied.problem or None,
        "effects": [
            jsonable(
                {
                    "code": o.code,
                    **effect_as_dict(o.effect),
                    "before": o.before,
                    "measured": o.measured,
                    "measured_steps": o.steps,
                    "came_true": o.came_true,
                }
            )
            for o in applied.outcomes
        ],
    }
