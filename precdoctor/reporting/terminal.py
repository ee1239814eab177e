"""Prints a diagnosis on a terminal: short, the most important finding first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, RuleOutcome, Severity, Status
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.verdict import too_few_steps
from precdoctor.reporting.console import can_draw
from precdoctor.reporting.finding_view import finding_view, note_view, place
from precdoctor.reporting.run_head import print_ending, run_facts
from precdoctor.reporting.tables import folded, grid, left
from precdoctor.reporting.text import clean, lost_rows, not_neutral, recording_cost
from precdoctor.runlog.shell import quoted_path

#: Findings beyond this many are named on one line each; `--output-format json` has them all.
FULL_FINDINGS = 8
#: Mark, its ASCII form and style, by status.
MARKS = {
    Status.PASSED: ("✓", "ok", "pd.good"),
    Status.FAILED: ("✗", "!!", "pd.bad"),
    Status.INDETERMINATE: ("?", "??", "pd.near"),
    Status.NOT_APPLICABLE: ("–", "--", "pd.quiet"),
}


def print_full(diagnosis: Diagnosis, console: Console, *, verbose: bool = False) -> None:
    """Print header, findings, number of rules checked, and the cost and losses of the recording.

    Notes (severity info) come last, two lines each, unless only one rule was run. ``verbose`` also lists every rule
    with its reason.
    """
    _print_header(diagnosis, console, verbose=verbose)
    asked = len(diagnosis.rules) == 1  # with `--select PD505` the user asked for this note: print it in full
    notes = [f for f in diagnosis.findings if f.severity is Severity.INFO and not asked]
    heavy = [f for f in diagnosis.findings if f not in notes]
    for finding in heavy[:FULL_FINDINGS]:
        console.print()
        console.print(finding_view(finding, console), crop=False)
    if rest := heavy[FULL_FINDINGS:]:
        console.print(f"\n{plural(len(rest), 'more finding')}:")
        for finding in rest:
            console.print(Padding(_finding_line(finding), (0, 0, 0, 2)), soft_wrap=True)
    if notes:
        console.print()
        for finding in notes:
            console.print(note_view(finding))
    if diagnosis.findings:
        console.print()
    _print_rules(diagnosis, console, verbose=verbose)
    _print_recorder(diagnosis.recorder, console)
    if notes:
        console.print(Text(f"A note in full: precdoctor diagnose --select {clean(notes[0].code)}", "pd.quiet"))
    if any(map(_lacks_its_op, heavy)) and diagnosis.run.get("cwd"):
        again = f"precdoctor autopsy {quoted_path(str(diagnosis.run.get('path')))}"
        console.print(Text(f"To find the op, run the command again, traced: {again}", "pd.quiet"), soft_wrap=True)
    if heavy:
        console.print(Text(f"More on a finding: precdoctor explain {clean(heavy[0].code)}", "pd.quiet"))


def _lacks_its_op(finding: Finding) -> bool:
    """Return whether a finding on a non-finite value names the code that made it but not the op, which a replay in
    ``autopsy`` could find: in a module, in the loss code, or after the data loader.
    """
    by_code = finding.code in ("PD101", "PD102", "PD103") and finding.cause is None
    prepared = finding.code == "PD104" and finding.evidence.get("provenance") in ("after-loader", "unknown")
    return finding.location.op is None and (by_code or prepared) and not finding.evidence.get("traced")


def print_concise(diagnosis: Diagnosis, console: Console) -> None:
    """Print one line per finding, for grep, then the verdict."""
    for finding in diagnosis.findings:
        console.print(_finding_line(finding), soft_wrap=True)
    console.print(Text(verdict_line(diagnosis)), soft_wrap=True)


def verdict_line(diagnosis: Diagnosis) -> str:
    """``2 errors, 1 warning`` or ``No findings``, followed by the number of rules that could not be judged."""
    levels = [f.severity.value for f in diagnosis.findings]
    names = {"error": "error", "warning": "warning", "info": "note"}
    counts = [plural(levels.count(level), name) for level, name in names.items() if level in levels]
    verdict = ", ".join(counts) or _no_findings(diagnosis)
    unknown = sum(r.status is Status.INDETERMINATE for r in diagnosis.rules)
    return f"{verdict}; {plural(unknown, 'rule')} could not be judged" if unknown else verdict


def _no_findings(diagnosis: Diagnosis) -> str:
    """``No findings``, with a caveat if the run had too few steps."""
    few = too_few_steps(diagnosis)
    return f"No findings, but {few}" if few else "No findings"


def _finding_line(finding: Finding) -> Text:
    """``PD101 error: title [blocks.3.attn output, forward, step 37]``."""
    severity = finding.severity.value
    where = place(finding)
    return Text.assemble(
        (finding.code, "pd.strong"),
        " ",
        (severity, f"pd.{severity}"),
        f": {clean(finding.title)}",
        (f"  [{where}]" if where else "", "pd.quiet"),
    )


def _print_header(diagnosis: Diagnosis, console: Console, *, verbose: bool) -> None:
    run = diagnosis.run
    if run.get("path"):
        console.print(Text(clean(run["path"]), "pd.quiet"), soft_wrap=True)
    if facts := run_facts(run):
        console.print(Text(facts, "pd.quiet"))
    print_ending(run, console)
    findings = bool(diagnosis.findings)
    style = "pd.strong" if findings else "pd.near" if diagnosis.verdict == "indeterminate" else "pd.good"
    console.print()
    headline = Text(verdict_line(diagnosis) + ".", style)
    if not findings and not verbose and diagnosis.rules:
        headline.append(f" {_rule_counts(diagnosis)}; `--verbose` lists them.", "none")
    console.print(headline)
    if verbose and not findings:
        console.print()


def _rule_counts(diagnosis: Diagnosis) -> str:
    """``21 rules checked, 35 not applicable``."""
    absent = sum(r.status is Status.NOT_APPLICABLE for r in diagnosis.rules)
    checked = sum(r.status in (Status.PASSED, Status.FAILED) for r in diagnosis.rules)
    return f"{plural(checked, 'rule')} checked" + (f", {absent} not applicable" if absent else "")


def _print_rules(diagnosis: Diagnosis, console: Console, *, verbose: bool) -> None:
    """Print the rules that could not be judged; with ``verbose`` all rules with their reasons, in triage order, those
    that do not apply last, grouped by reason. Prints their number only if there are findings; else the header has it.
    """
    if diagnosis.findings and not verbose and len(diagnosis.rules) > 1:
        console.print(f"{_rule_counts(diagnosis)}; `--verbose` lists them.")
    absent = [r for r in diagnosis.rules if verbose and r.status is Status.NOT_APPLICABLE]
    listed = (Status.INDETERMINATE, Status.PASSED, Status.FAILED) if verbose else (Status.INDETERMINATE,)
    shown = [r for r in diagnosis.rules if r.status in listed]
    for title, table in (("Checked, in this order:", _outcomes(shown, console)), ("Not applicable:", _reasons(absent))):
        if table.row_count:
            if verbose:
                console.print(title)
            console.print(Padding(table, (0, 0, 1 if verbose else 0, 2)))


def _outcomes(outcomes: Sequence[RuleOutcome], console: Console) -> Table:
    table = grid(*left("", "", ""), *folded(""))
    for outcome in outcomes:
        mark, plain, style = MARKS[outcome.status]
        reason = clean(outcome.reason)
        if outcome.status is Status.INDETERMINATE:
            reason = f"cannot be judged: {reason}"
        table.add_row(
            Text(mark if can_draw(console) else plain, style),
            clean(outcome.code),
            clean(outcome.name),
            Text(reason, "pd.quiet" if outcome.status is Status.NOT_APPLICABLE else ""),
        )
    return table


def _reasons(outcomes: Sequence[RuleOutcome]) -> Table:
    """One row for each reason: ``PD401-PD404, PD406  no tensor is cast to a float8 dtype``."""
    table = grid({"max_width": 24}, *folded("", style="pd.quiet"))
    for reason in dict.fromkeys(r.reason for r in outcomes):
        codes = sorted(r.code for r in outcomes if r.reason == reason)
        table.add_row(clean(_ranges(codes)), clean(reason))
    return table


def _ranges(codes: Sequence[str]) -> str:
    """Sorted codes as ranges: ``PD401-PD404, PD406``."""
    runs: list[list[str]] = []
    for code in codes:
        if runs and code[:-2] == runs[-1][-1][:-2] and int(code[-2:]) == int(runs[-1][-1][-2:]) + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _print_recorder(recorder: Mapping[str, Any], console: Console) -> None:
    """Print the cost of the recording, dropped rows, code it could not see, and its errors."""
    sentences = [cost] if (cost := recording_cost(recorder)) else []
    if changed := not_neutral(recorder):
        sentences.append(f"It was {changed}.")
    if lost := lost_rows(recorder):
        sentences.append(f"Rows lost: {lost}.")
    if sentences:
        console.print(Text(" ".join(sentences), "pd.near" if lost else "pd.quiet"))
    for unseen in list(recorder.get("unseen") or []):
        console.print(Text(f"Not seen: {clean(unseen)}.", "pd.near"))
    for error in list(recorder.get("errors") or [])[:3]:
        console.print(Text(f"Recorder: {clean(error)}", "pd.near"))
