"""Prints the list of rules, and the page of one rule or regression, for ``explain``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.comparison.compare import FIRST_DIFFERENCE
from precdoctor.comparison.leading import INDICATORS
from precdoctor.comparison.regressions import REGRESSIONS, Regression
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.reporting.tables import grid, left
from precdoctor.reporting.text import clean, clean_block


def print_rules(families: Iterable[tuple[str, Sequence[Rule]]], console: Console) -> None:
    """Print code, name and severity of every rule, by family, and of the checks of gate, compare and record."""
    against = sorted([*REGRESSIONS, FIRST_DIFFERENCE], key=lambda entry: entry.code)
    checked: list[tuple[str, Sequence[Rule | Regression]]] = [
        *families,
        ("Against another run, gate and compare also check", against),
        ("With record --reference, a running training is also held against a healthy one", INDICATORS),
    ]
    wide = max(len(entry.name) for _, entries in checked for entry in entries)
    for title, entries in checked:
        console.print(Text(title, "pd.strong"))
        table = grid(*left("  ", "", style="pd.strong"), *left("", ""))
        for entry in entries:
            severity = entry.severity.value
            table.add_row("", clean(entry.code), f"{clean(entry.name):{wide}}", Text(severity, f"pd.{severity}"))
        console.print(table)
        console.print()
    console.print(Text("The page of one: precdoctor explain PD101", "pd.quiet"))


def print_page(entry: Rule | Regression, console: Console) -> None:
    """Print the page of a rule, or the meaning and the options of a regression."""
    severity = entry.severity_words if isinstance(entry, Rule) else entry.severity.value
    head = ((entry.code, "pd.strong"), f"  {clean(entry.name)}  ", (severity, f"pd.{entry.severity.value}"))
    console.print(Text.assemble(*head))
    if isinstance(entry, Regression):
        console.print(Text(f"\n{clean(entry.doc)} {entry.checked}"))
    for title, text in _sections(entry):
        if text.strip():
            console.print(Text(f"\n{title}", "pd.strong"))
            _print_block(reflow(clean_block(text.strip("\n"))), console)


def _sections(entry: Rule | Regression) -> list[tuple[str, str]]:
    options = ("Options", _options(entry))
    if isinstance(entry, Regression):
        return [options]
    page = entry.page
    return [
        ("What it finds", page.finds),
        ("Why it matters", page.matters),
        ("Example", page.example),
        ("What to do", page.remedy),
        options,
        ("Confidence", page.confidence),
        ("References", "\n".join(f"- {reference}" for reference in page.references)),
    ]


def _print_block(text: str, console: Console) -> None:
    """Print text, wrapped: continuation lines are indented like their line, in lists by the width of the dash."""
    for line in text.splitlines():
        begin = len(line) - len(line.lstrip()) + 2 * line.lstrip().startswith("- ")
        wrapped = textwrap.wrap(line, console.width - 2, subsequent_indent=" " * begin, break_on_hyphens=False)
        console.print(Padding(Text("\n".join(wrapped)), (0, 0, 0, 2)))


def reflow(text: str) -> str:
    """Join the lines of each paragraph and list item, to be wrapped anew; code and tables keep their lines."""
    lines: list[str] = []
    joins = listed = False
    for line in text.splitlines():
        item = line.startswith("- ")
        prose = bool(line.strip()) and not item and not line.startswith((" ", "|", "[", "#"))
        rest = listed and line.startswith("  ") and not line.lstrip().startswith("- ")
        if joins and (prose or rest):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        listed = item or (listed and rest)
        joins = prose or item or listed
    return "\n".join(lines)


def _options(rule: Rule | Regression) -> str:
    """The options as a table of a settings file, ready to paste; empty without options."""
    if not rule.options:
        return ""
    lines = [f"[tool.precdoctor.rules.{rule.code}]"]
    for option in rule.options:
        lines += [f"{option.name} = {option.default:g}", f"    {option.unit}: {option.doc} {option.source}".rstrip()]
    return "\n".join(lines)
