"""Prints ``show``: facts of a run, timeline, the tensors nearest to the limits of their formats, and deep scans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.analyses.op_dtypes import OpDtypes, Pattern, patterns
from precdoctor.diagnosis.analyses.scans import Scan
from precdoctor.diagnosis.claims.words import memory, module_label, percent, plural
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.run_head import print_ending, print_head
from precdoctor.reporting.sparkline import sparkline
from precdoctor.reporting.summary import Summary, TensorSummary
from precdoctor.reporting.tables import Name, facts, folded, grid, left, right, table
from precdoctor.reporting.text import (
    SERIES,
    clean,
    factor,
    lost_rows,
    not_neutral,
    number,
    recording_cost,
)

#: From this width on, module and tensor have a column each.
_ROOMY = 100
#: Words for the reasons of a deep scan.
_REASONS = {"first": "first steps", "spaced": "log-spaced", "evidence": "recorded numbers"}
#: Most modules named in one row.
_MODULES = 4


def print_summary(summary: Summary, console: Console) -> None:
    """Print the whole of ``precdoctor show RUN``."""
    print_head(summary.run, console)
    print_ending(summary.run, console)
    console.print(Padding(facts((label, clean(value)) for label, value in _facts(summary)), (1, 0, 0, 0)))
    if not summary.steps:
        console.print(Text("\nNo training step was recorded.", "pd.near"))
        return
    _print_timeline(summary, console)
    several = summary.models_with_modules > 1
    if summary.tightest:
        _print_tensors("Least headroom below the largest number of their format", summary.tightest, several, console)
    if summary.subnormal:
        _print_tensors("Most subnormal numbers: next to being flushed to zero", summary.subnormal, several, console)
    if summary.casts:
        _print_casts(summary.casts, several, console)


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    about = summary.about
    if about.get("started"):
        yield "started", str(about["started"])
    versions = summary.run.get("versions")
    if isinstance(versions, Mapping) and versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if summary.models:
        yield "models", ", ".join(summary.models)
    options = about.get("options")
    if isinstance(options, Mapping):
        every, budget = options.get("every", 1), options.get("budget", 0.01)
        yield "sampling", f"every {every}" if every is not None else f"within a budget of {percent(float(budget))}"
    rows = ", ".join(plural(count, f"{name.removesuffix('s')} row") for name, count in summary.rows.items())
    yield "log", f"{rows}, {memory(summary.size)}"
    if summary.kinds:
        yield "kinds", ", ".join(f"{kind} {number(count)}" for kind, count in summary.kinds.items())
        yield "dtypes", ", ".join(f"{dtype} {number(count)}" for dtype, count in summary.dtypes.items())
    if summary.events:
        yield "events", ", ".join(f"{event} {number(count)}" for event, count in summary.events.items())
    if cost := recording_cost(summary.recorder):
        yield "overhead", cost.removeprefix("Recording took ")
    if changed := not_neutral(summary.recorder):
        yield "neutral", f"no: {changed}"
    yield "lost rows", lost_rows(summary.recorder) or "none"
    open_ranks = [p for p in summary.processes if not p["complete"]]
    early = next((p["cut_short"] for p in summary.processes if p["cut_short"]), None)
    how = f"before the training ended: {clean(early, 160)}" if early else "cleanly"
    if not summary.processes:
        how = "no process has recorded anything yet"
    yield "closed", f"not by {_names(open_ranks)}" if open_ranks else how


def _names(processes: Sequence[Mapping[str, int]]) -> str:
    names = [f"rank {p['rank']}" + (f" attempt {p['attempt']}" if p["attempt"] else "") for p in processes]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _print_timeline(summary: Summary, console: Console) -> None:
    """Print one sparkline per series that has values, with first and last value, and the skipped and bad steps."""
    first, last = summary.steps[0], summary.steps[-1]
    console.print(Text(f"\nTimeline, steps {first} to {last}", "pd.strong"))
    shown = grid(*left("", style="pd.label"), *right(""), *left("", ""))
    width = max(16, min(72, console.width - 44))
    plain = not can_draw(console)
    for name, (title, log, spell) in SERIES.items():
        values = summary.timeline.get(name, [])
        recorded = [v for v in values if v is not None]
        if recorded:
            line = sparkline(values, width, ascii_only=plain, log=log)
            shown.add_row(title, spell(recorded[0]), Text(line, "pd.code"), spell(recorded[-1]))
    skipped = [step for step, v in zip(summary.steps, summary.timeline.get("skipped", []), strict=False) if v]
    bad = [step for step, v in zip(summary.steps, summary.timeline.get("non_finite", []), strict=False) if v]
    for title, found, style in (("skipped", skipped, "pd.near"), ("non-finite", bad, "pd.bad")):
        if found:
            chosen = set(found)
            marks = [1.0 if step in chosen else None for step in summary.steps]
            line = sparkline(marks, width, ascii_only=plain)
            shown.add_row(title, number(len(found)), Text(line, style), f"first at step {found[0]}")
    console.print(Padding(shown, (0, 0, 0, 2)))
    if any(v is not None and not math.isfinite(v) for v in summary.timeline.get("loss", [])):
        console.print(Text("  x marks a NaN or Inf", "pd.quiet"))


def _name_cells(console: Console, module: str, name: str) -> tuple[Name, ...]:
    """The cells of module and tensor name; on a narrow terminal a single cell with both."""
    return (Name(module), Name(name)) if console.width >= _ROOMY else (Name(f"{module} {name}".strip()),)


def _name_table(console: Console, second: str, narrow: str, *numbers: str) -> Table:
    """A table whose rows begin with the cells of :func:`_name_cells`."""
    titles = ("module", second) if console.width >= _ROOMY else (second,)
    return table(*({"header": title} for title in titles), *left(narrow), *right(*numbers))


def _print_tensors(title: str, tensors: Sequence[TensorSummary], several: bool, console: Console) -> None:
    console.print(Text(f"\n{title}", "pd.strong"))
    shown = _name_table(console, "tensor", "dtype", "amax", "headroom", "subnormal", "zero", "NaN/Inf")
    for t in tensors:
        shown.add_row(
            *_name_cells(console, module_label(t.root, t.module, several=several), f"{t.kind} {t.name}".strip()),
            clean(t.dtype),
            number(t.amax),
            factor(t.headroom_binades),
            percent(t.subnormal_fraction),
            percent(t.zero_fraction),
            number(t.non_finite),
            style="pd.bad" if t.non_finite else None,
        )
    console.print(Padding(shown, (0, 0, 0, 2)))


def _print_casts(tensors: Sequence[TensorSummary], several: bool, console: Console) -> None:
    console.print(Text("\nCasts to a narrow format: what they clipped, and what they made zero", "pd.strong"))
    shown = _name_table(console, "operand", "cast to", "amax", "headroom", "clipped", "flushed")
    for t in tensors:
        shown.add_row(
            *_name_cells(console, module_label(t.root, t.module, several=several), t.name),
            clean(t.format or ""),
            number(t.amax),
            factor(t.headroom_binades),
            *("–" if share is None else percent(share) for share in (t.saturated_fraction, t.flushed_fraction)),
        )
    console.print(Padding(shown, (0, 0, 0, 2)))


def print_scans(scans: Sequence[Scan], console: Console) -> None:
    """Print one row per deep scan."""
    if not scans:
        console.print(Text("No step of this run was scanned; record it with --deep-scan N."))
        return
    console.print(Text("Deep scans, and why each step was chosen", "pd.strong"))
    shown = table(*right("step", "rank"), *left("outcome"), *right("ops", "facts"), *folded("why", min_width=20))
    for scan in scans:
        why = "; ".join(scan.evidence) or scan.why or _REASONS.get(scan.reason, "-")
        shown.add_row(
            number(scan.step),
            number(scan.process.rank),
            clean(scan.outcome),
            number(scan.ops),
            number(scan.found),
            clean(why),
        )
    console.print(Padding(shown, (0, 0, 0, 2)))


def pattern_cells(row: Pattern) -> tuple[str, ...]:
    """``(op, phase, dtypes, calls, elements, amax, modules)``; dtypes as ``float32 to bfloat16``, or once if equal."""
    inputs, outputs = row.inputs or "-", row.outputs or "-"
    more = len(row.modules) - _MODULES
    return (
        clean(row.op),
        clean(row.phase),
        clean(inputs if inputs == outputs else f"{inputs} to {outputs}"),
        number(row.calls),
        number(row.elements),
        number(row.amax),
        clean(", ".join(row.modules[:_MODULES]) + (f" and {more} more" if more > 0 else "")),
    )


def print_dtypes(entries: Sequence[OpDtypes], console: Console) -> None:
    """Print one row per op, phase and dtypes."""
    if not entries:
        console.print(
            Text("No step of this run was scanned op by op; record it with --deep-scan N to see dtypes per op.")
        )
        return
    console.print(Text("Ops and the dtypes they computed in, of one scanned step", "pd.strong"))
    shown = table(
        *folded("op", min_width=16),
        *left("phase"),
        *folded("dtypes", min_width=12),
        *right("calls", "amax"),
        *folded("modules", min_width=14),
    )
    for op, phase, dtypes, calls, _, amax, modules in map(pattern_cells, patterns(entries)):
        shown.add_row(op, phase, dtypes, calls, amax, modules)
    console.print(Padding(shown, (0, 0, 0, 2)))
