"""Which op computed in which dtype, as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.survey.op_dtypes import OpDtypes, Pattern, patterns
from precdoctor.reporting.text import clean, number

#: Modules named in one row.
_MODULES = 4


def dtypes_words(row: Pattern) -> str:
    """``float32 to bfloat16``; one name where they are the same."""
    inputs, outputs = row.inputs or "-", row.outputs or "-"
    return inputs if inputs == outputs else f"{inputs} to {outputs}"


def modules_words(row: Pattern) -> str:
    """The first few modules, and how many more."""
    more = len(row.modules) - _MODULES
    return ", ".join(row.modules[:_MODULES]) + (f" and {more} more" if more > 0 else "")


def print_dtypes(entries: Sequence[OpDtypes], console: Console) -> None:
    """One row per op, phase and dtypes."""
    if not entries:
        console.print(
            Text("No step of this run was scanned op by op; record it with --deep-scan N to see dtypes per op.")
        )
        return
    console.print(Text("Ops and the dtypes they computed in, of one scanned step", "pd.strong"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="pd.label", pad_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("dtypes", no_wrap=True)
    for column in ("calls", "amax"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold", min_width=20)
    for row in patterns(entries):
        table.add_row(
            clean(row.op),
            clean(row.phase),
            clean(dtypes_words(row)),
            number(row.calls),
            number(row.amax),
            clean(modules_words(row)),
        )
    console.print(Padding(table, (0, 0, 0, 2)))
