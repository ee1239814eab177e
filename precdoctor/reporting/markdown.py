"""Renders a report as GitHub-flavoured Markdown, for job summaries and comments: verdict, table, then each finding."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precdoctor.diagnosis.claims.finding import Finding, Status
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.ending import ending
from precdoctor.reporting.finding_view import place, predicted_effect, stated_facts
from precdoctor.reporting.outputs import Report
from precdoctor.reporting.run_head import run_facts
from precdoctor.reporting.text import clean, clean_block, not_neutral, recording_cost

#: Most findings in full, because GitHub truncates a job summary at 1 MiB.
FULL_FINDINGS = 20
#: Most rows of a table.
MAX_ROWS = 100
#: Characters to escape: markup anywhere, the colons of emoji codes and URLs, list markers at the beginning.
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$]|:(?=[\w+-]+:|//|:)|^[-+](?=\s)|(?<=^\d)[.)](?=\s))")


def markdown(report: Report) -> str:
    """The document. Recorded names are escaped, so that they are never taken for markup or mentions."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def escaped(value: object) -> str:
    """``value`` as one line, escaped so that Markdown shows it literally."""
    text = _SPECIAL.sub(r"\\\1", clean(value))
    return text.replace("&", "&amp;").replace("@", "&#64;").replace("\\<", "&lt;").replace("\\>", "&gt;")


def prose(value: object) -> str:
    """As :func:`escaped`, but names in backticks become code spans, as in the project's own sentences."""
    parts = clean(value).split("`")
    if len(parts) % 2 == 0:  # a name contains a backtick
        return escaped(value)
    return "".join(code(part) if at % 2 and part.strip() else escaped(part) for at, part in enumerate(parts))


def code(value: object) -> str:
    """``value`` as an inline code span; may contain backticks and bars."""
    text = clean(value).replace("|", "¦")  # a bar would end a table cell even inside a code span
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest or not text.strip() else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    body = re.sub(r"^(\s*)::", r"\1: :", clean_block(text.strip("\n")), flags=re.MULTILINE)  # or GitHub runs it
    longest = max((len(run) for run in re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{body}\n{fence}"


def _lines(report: Report) -> Iterator[str]:
    diagnosis = report.diagnosis
    yield f"## precdoctor {escaped(report.headline)}"
    yield ""
    facts = run_facts(diagnosis.run)
    if diagnosis.run.get("path"):
        yield f"{code(diagnosis.run['path'])}{': ' + escaped(facts) if facts else ''}"
        yield ""
    if end := ending(diagnosis.run):
        yield f"{escaped(end)}."
        yield ""
    for reason in (r for r in report.distrust if r != end):
        yield f"**No trustworthy verdict:** {prose(reason)}"
        yield ""
    if diagnosis.findings:
        yield from _table(report)
        for finding in diagnosis.findings[:FULL_FINDINGS]:
            yield from _finding(finding)
    if report.gate is not None:
        yield from _checks(report)
    yield from _rules(report)
    if cost := recording_cost(diagnosis.recorder):
        yield cost
    if changed := not_neutral(diagnosis.recorder):
        yield f"It was {changed}."


def _table(report: Report) -> Iterator[str]:
    yield "| | code | finding | where |"
    yield "|---|---|---|---|"
    findings = report.diagnosis.findings
    for finding in findings[:MAX_ROWS]:
        where = escaped(place(finding))
        yield f"| {finding.severity.value} | {finding.code} | {prose(finding.title)} | {where} |"
    yield ""
    if len(findings) > MAX_ROWS:
        yield f"{plural(len(findings) - MAX_ROWS, 'more finding')} left out of this table."
        yield ""


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {finding.code} {finding.name}: {prose(finding.title)}"
    yield ""
    yield prose(finding.message)
    yield ""
    for label, text, line in stated_facts(finding):
        if label not in ("where", "certainty"):
            yield f"- {label}: {code(text)}{' ' + code(line) if line else ''}"
    if resume := finding.resume_words:
        yield f"- resume {escaped(resume)}"
    for prescription in finding.prescriptions:
        predicted = predicted_effect(prescription.predicted)
        yield f"- do: **{prose(prescription.title)}**{f' (predicted: {escaped(predicted)})' if predicted else ''}"
        if prescription.snippet.strip():
            yield ""
            yield _block(prescription.snippet)
            yield ""
    yield ""


def _checks(report: Report) -> Iterator[str]:
    """The gate's suspects and a table of its failed checks."""
    gate = report.gate
    failed = [] if gate is None else [c for c in gate.checks if c.passed is False]
    if gate is not None and gate.suspects:
        yield f"Look first at: {', '.join(code(m) if m else 'the model itself' for m in gate.suspects[:3])}"
        yield ""
    if failed:
        yield "| | check | subject | expected | found | limit |"
        yield "|---|---|---|---|---|---|"
        for check in failed[:MAX_ROWS]:
            cells = (check.check, check.subject, check.expected, check.found, check.limit)
            yield f"| {'fails' if check.fails else 'warns'} | {' | '.join(map(prose, cells))} |"
        yield ""


def _rules(report: Report) -> Iterator[str]:
    rules = report.diagnosis.rules
    if not rules:
        return
    passed, failed = (sum(r.status is status for r in rules) for status in (Status.PASSED, Status.FAILED))
    yield f"<details><summary>{plural(passed + failed, 'rule')} checked, {passed} passed</summary>"
    yield ""
    yield "| rule | | what was seen |"
    yield "|---|---|---|"
    for rule in rules[:MAX_ROWS]:
        yield f"| {rule.code} {escaped(rule.name)} | {rule.status.value} | {prose(rule.reason)} |"
    yield ""
    yield "</details>"
    yield ""
