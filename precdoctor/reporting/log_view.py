"""Prints the result of ``log verify``: one line per process, then the problems."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.diagnosis.claims.words import plural
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.tables import folded, left, right, table
from precdoctor.reporting.text import clean, number
from precdoctor.runlog.verify import RankReport, Verification

#: Most problems to print per process.
_PROBLEMS = 20


def print_verification(verification: Verification, console: Console) -> None:
    """Print a table of the processes, their problems, and the verdict in one line."""
    console.print(Text(clean(verification.path), "pd.strong"), soft_wrap=True)
    if not verification.ranks:
        console.print(Text("No process recorded anything.", "pd.near"))
        return
    shown = table(*left("process"), *right("parts", "rows", "steps", "lost rows"), *folded("closed"))
    for rank in verification.ranks:
        shown.add_row(*_row(rank, "–" if can_draw(console) else "-"), style=None if rank.ok else "pd.bad")
    console.print(Padding(shown, (1, 0, 1, 2)))
    for rank in verification.ranks:
        for problem in rank.problems[:_PROBLEMS]:
            console.print(Text(f"  {clean(problem)}", "pd.bad"))
        if len(rank.problems) > _PROBLEMS:
            console.print(Text(f"  {rank.name}: {len(rank.problems) - _PROBLEMS} more problems", "pd.bad"))
    if damaged := sum(not rank.ok for rank in verification.ranks):
        console.print(Text(f"{plural(damaged, 'process')} cannot be trusted.", "pd.bad"))
    else:
        console.print(Text("Sound: every row that was written can be read.", "pd.good"))


def _row(rank: RankReport, dash: str) -> tuple[str, ...]:
    steps = rank.step_range
    closed = (
        "cleanly" if rank.clean_close else "still recording" if rank.live else "no: killed, at most 1 s of rows lost"
    )
    return (
        clean(rank.name),
        number(len(rank.parts) + len(rank.streams)),
        number(rank.rows),
        f"{steps[0]}{dash}{steps[1]}" if steps else "none",
        number(sum(rank.dropped.values())),
        closed,
    )
