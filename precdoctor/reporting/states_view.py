"""Renders ``whatif --state``, the forecast for optimizer states in another format, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.offline.whatif.states import StateForecast, StatesAnswer
from precdoctor.reporting import whatif_report, whatif_view
from precdoctor.reporting.run_head import print_head
from precdoctor.reporting.tables import folded, table
from precdoctor.reporting.text import clean
from precdoctor.runlog.atomic import jsonable


def print_states(answer: StatesAnswer, run: Mapping[str, Any], console: Console, *, worst: int) -> None:
    """Print the full report; the table lists at most ``worst`` states."""
    print_head(run, console, whatif_view.question(answer.answer))
    console.print(Text(_verdict(answer), "pd.bad" if _failing(answer) else "pd.good"))
    if shown := answer.states[:worst]:
        console.print(Padding(_table(shown), (1, 0, 1, 0)))
    for line in _notes(answer):
        console.print(Text(line, "pd.quiet"))


def _failing(answer: StatesAnswer) -> int:
    return sum(s.forecast.holds is False for s in answer.states)


def _verdict(answer: StatesAnswer) -> str:
    total, failing = len(answer.states), _failing(answer)
    target = whatif_view.target(answer.answer)
    head = (
        f"{failing} of {plural(total, 'state')} would not survive" if failing else f"All {plural(total, 'state')} hold"
    )
    return (
        f"{head} (target: {target}). Over all elements {percent(answer.share('flushed'))} become zero. "
        f"{percent(answer.share('doubled'))} of the second moments do so above eps^2."
    )


def _table(states: tuple[StateForecast, ...]) -> Table:
    titles = ("step", "become zero", "SQNR", "steps > 2x", "up to", "error of the rest")
    shown = table(*folded("state"), *({"header": title, "justify": "right"} for title in titles))
    for s in states:
        f, e = s.forecast, s.effect
        cells = ["–" if f.step is None else str(f.step)]
        cells += (
            ["–", "–"]
            if f.prediction is None
            else [percent(f.flushed), whatif_view.decibels(f.prediction.sqnr_db.estimate)]
        )
        cells += ["–"] * 3 if e is None else [percent(e.doubled.estimate), f"{e.longest:.3g}x", percent(e.error)]
        style = "pd.bad" if f.holds is False else ""
        shown.add_row(Text(clean(f"{s.parameter} {s.state}"), style), *cells)
    return shown


def _notes(answer: StatesAnswer) -> Iterator[str]:
    recipe = answer.answer.question.recipe
    yield (
        f"steps > 2x: second moments that become zero above eps^2 (eps {answer.eps:g}). A step that divides by "
        "sqrt(v) + eps as stored gets up to so many times as long."
    )
    longest = f"{answer.longest_after:.3g}x"
    yield f"An optimizer that adds the new squared gradient before it divides makes steps at most {longest} too long."
    if answer.stalls:
        yield f"A second moment cannot decay in {recipe.name}: 1 - beta2 is below half an ulp (PD505)."
    yield "Moments are predicted as recorded: rounding them at each step would change later ones."


def document(answer: StatesAnswer, run: Mapping[str, Any]) -> dict[str, Any]:
    """The forecast as JSON values, one entry per state, the worst first."""
    recipe = answer.answer.question.recipe
    states = [
        {
            "parameter": s.parameter,
            "state": s.state,
            **whatif_report.tensor(s.forecast, recipe),
            "doubled": jsonable(s.effect.doubled) if s.effect else None,
            "longest": jsonable(s.effect.longest) if s.effect else None,
            "error_of_rest": jsonable(s.effect.error) if s.effect else None,
        }
        for s in answer.states
    ]
    body = {
        "recipe": whatif_report.described(recipe),
        "eps": answer.eps,
        "longest_after_adding": jsonable(answer.longest_after),
        "stalls": answer.stalls,
        "failing": _failing(answer),
        "flushed": answer.share("flushed"),
        "doubled": answer.share("doubled"),
        "states": states,
    }
    return whatif_report.answer_document("state", recipe.name, run, body)
