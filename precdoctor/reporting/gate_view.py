"""Prints a gate's report on a terminal or in a CI log: the verdict, then one line per check, failures first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.comparison.gate import GateCheck, GateReport
from precdoctor.diagnosis.claims.finding import Status
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.verdict import ExitCode
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.tables import folded, grid, left
from precdoctor.reporting.terminal import MARKS
from precdoctor.reporting.text import clean
from precdoctor.runlog.shell import quoted_path

#: Most suspect modules to name.
_SUSPECTS = 3
#: Most subjects to list for one check.
_SUBJECTS = 8
_IDLE = Status.NOT_APPLICABLE
#: Mark, its ASCII form, style.
_FAILS, _OPEN, _PASSED = (MARKS[status] for status in (Status.FAILED, Status.NOT_APPLICABLE, Status.PASSED))
_WARNS = ("!", "! ", "pd.near")
#: The order in which checks are listed.
_URGENCY = (_FAILS, _WARNS, _OPEN, _PASSED)


def print_gate(report: GateReport, console: Console, *, concise: bool = False) -> None:
    """Print the verdict, reasons not to trust it, and the checks; ``concise`` lists only failed checks."""
    idle = {(d.run.get("path"), f"{r.code} {r.name}") for d in report.diagnoses for r in d.rules if r.status is _IDLE}
    console.print(_verdict(report, sum((c.run, c.check) not in idle for c in report.checks)))
    for reason in report.untrustworthy:
        console.print(Text(f"  {clean(reason)}", "pd.near"))
    for note in report.notes:
        console.print(Padding(Text(f"Note: {clean(note)}", "pd.quiet"), (0, 0, 0, 2)))
    if report.suspects:
        named = [clean(module) or "the model itself" for module in report.suspects[:_SUSPECTS]]
        console.print(Text(f"  Look first at: {', '.join(named)}", "pd.strong"), soft_wrap=True)
    for run in report.runs:
        checks = [c for c in report.checks if c.run == run and (run, c.check) not in idle]
        checks = sorted((c for c in checks if not concise or c.passed is False), key=lambda c: _URGENCY.index(_mark(c)))
        against = f", against {report.baseline}" if report.baseline else ""
        console.print(Text(f"\n{clean(run)}{clean(against)}", "pd.strong"), soft_wrap=True)
        if checks and concise:  # a line each, for grep
            for check in _shortened(checks):
                console.print(Text(f"  {clean(check.check)}  {_words(check)}"), soft_wrap=True)
        elif checks:
            console.print(Padding(_table(_shortened(checks), console), (0, 0, 0, 2)))
        elif concise:
            console.print(Text("  nothing to report", "pd.quiet"))
        idle_here = sum(path == run for path, _ in idle)
        if idle_here and not concise:
            console.print(Text(f"  {plural(idle_here, 'check')} not applicable to this run", "pd.quiet"))
        for command in _next_commands(report, run, checks):
            console.print(Text(f"  {command}", "pd.quiet"), soft_wrap=True)


def _next_commands(report: GateReport, run: str, checks: Sequence[GateCheck]) -> Iterator[str]:
    """Commands to run next: ``diagnose`` for failed rules, ``compare`` for failed regressions."""
    failed = [c.check for c in checks if c.passed is False]
    regressed = [check for check in failed if check.startswith("PD8")]
    if len(failed) > len(regressed):
        yield f"Causes and remedies: precdoctor diagnose {quoted_path(run)}"
    if report.baseline and (report.untrustworthy or regressed):
        local_run = next((r for r in report.baseline_runs if Path(r).is_dir()), None)
        base = "A_RUN_OF_THE_BASELINE" if local_run is None else quoted_path(local_run)
        yield f"What moved, and where first: precdoctor compare {base} {quoted_path(run)}"


def _shortened(checks: Sequence[GateCheck]) -> list[GateCheck]:
    """The first ``_SUBJECTS`` lines of each check, the last of them with the number left out; JSON has all."""
    shown: list[GateCheck] = []
    count = Counter(c.check for c in checks)
    seen: Counter[str] = Counter()
    for check in checks:
        seen[check.check] += 1
        if seen[check.check] <= _SUBJECTS:
            more = count[check.check] - _SUBJECTS
            last = seen[check.check] == _SUBJECTS and more > 0
            shown.append(replace(check, limit=f"{check.limit}; and {more:,} more") if last else check)
    return shown


def _verdict(report: GateReport, applicable: int) -> Text:
    failing = sum(c.fails for c in report.checks)
    tail = f": {failing} of {plural(applicable, 'check')} at or above {report.fail_on}"
    if report.exit_code == ExitCode.CLEAN:
        return Text(f"PASSED: {plural(applicable, 'check')}, none fails at {report.fail_on}.", "pd.good")
    if report.exit_code == ExitCode.FINDINGS:
        return Text(f"FAILED{tail}.", "pd.error")
    return Text(f"NO TRUSTWORTHY VERDICT{tail if failing else ''}.", "pd.warning")


def _mark(check: GateCheck) -> tuple[str, str, str]:
    if check.passed is None:
        return _OPEN
    return _PASSED if check.passed else _FAILS if check.fails else _WARNS


def _table(checks: Sequence[GateCheck], console: Console) -> Table:
    table = grid(*left("", ""), *folded(""))
    for check in checks:
        mark, plain, style = _mark(check)
        name = clean(check.check)
        table.add_row(Text(mark if can_draw(console) else plain, style), name, Text(_words(check)))
    return table


def _words(check: GateCheck) -> str:
    """Subject, expected, found and limit; for a rule without a finding, its reason."""
    subject, found = clean(check.subject), clean(check.found)
    if check.passed is not False and check.expected == "no finding":
        return found if check.passed else f"not judged: {found}"
    return f"{subject}: expected {clean(check.expected)}, found {found}, limit {clean(check.limit)}"
