"""What deep scans saw: which steps, why, and which op computed in which dtype; as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.diagnosis.survey.op_dtypes import OpDtypes, Pattern, patterns
from precdoctor.diagnosis.survey.scans import Scan
from precdoctor.reporting.tables import folded, left, right, table
from precdoctor.reporting.text import clean, number

#: What a reason is called.
_REASONS = {"first": "first steps", "spaced": "log-spaced", "evidence": "recorded numbers"}

#: Modules named in one row.
_MODULES = 4


def print_scans(scans: Sequence[Scan], console: Console) -> None:
    """One row per scan."""
    if not scans:
        console.print(Text("No step of this run was scanned; record it with --deep-scan N."))
        return
    console.print(Text("Deep scans, and why each step was chosen", "pd.strong"))
    shown = table(*right("step", "rank"), *left("outcome"), *right("ops", "facts"), *folded("why", min_width=20))
    for scan in scans:
        why = "; ".join(scan.evidence) or scan.why or _REASONS.get(scan.reason, "-")
        shown.add_row(
            number(scan.step), number(scan.rank), clean(scan.outcome), number(scan.ops), number(scan.found), clean(why)
        )
    console.print(Padding(shown, (0, 0, 0, 2)))


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
    shown = table(*left("op", "phase", "dtypes"), *right("calls", "amax"), *folded("modules", min_width=20))
    for row in patterns(entries):
        shown.add_row(
            clean(row.op),
            clean(row.phase),
            clean(dtypes_words(row)),
            number(row.calls),
            number(row.amax),
            clean(modules_words(row)),
        )
    console.print(Padding(shown, (0, 0, 0, 2)))
