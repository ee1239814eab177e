"""Which steps were scanned, and why, as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.survey.scans import Scan
from precdoctor.reporting.text import clean, number

#: What a reason is called.
_REASONS = {"first": "first steps", "spaced": "log-spaced", "evidence": "recorded numbers"}


def print_scans(scans: Sequence[Scan], console: Console) -> None:
    """One row per scan."""
    if not scans:
        console.print(Text("No step of this run was scanned; record it with --deep-scan N."))
        return
    console.print(Text("Deep scans, and why each step was chosen", "pd.strong"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="pd.label", pad_edge=False)
    for column in ("step", "rank"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for column in ("ops", "facts"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=20)
    for scan in scans:
        why = "; ".join(scan.evidence) or scan.why or _REASONS.get(scan.reason, "-")
        table.add_row(
            number(scan.step), number(scan.rank), clean(scan.outcome), number(scan.ops), number(scan.found), clean(why)
        )
    console.print(Padding(table, (0, 0, 0, 2)))
