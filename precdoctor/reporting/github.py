"""Renders a report as GitHub workflow commands: annotations on the pull request, and the verdict as a plain line."""

from __future__ import annotations

from collections.abc import Iterator

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.verdict import ExitCode
from precdoctor.reporting.finding_view import place
from precdoctor.reporting.outputs import Report
from precdoctor.reporting.places import file_line
from precdoctor.reporting.text import clean

#: GitHub shows ten annotations of each kind per step and silently drops the rest.
MAX_ANNOTATIONS = 10
_KINDS = {"error": "error", "warning": "warning", "info": "notice"}


def github(report: Report) -> str:
    """One command per line, errors first. Beyond GitHub's limit a kind's last command states how many are left out."""
    commands: dict[str, list[str]] = {kind: [] for kind in _KINDS.values()}
    if report.exit_code == ExitCode.UNTRUSTWORTHY:
        for reason in report.distrust:
            commands["error"].append(command("error", f"no trustworthy verdict: {reason}", title="precdoctor"))
    for finding in report.diagnosis.findings:
        kind = _KINDS[finding.severity.value]
        commands[kind].append(_annotation(finding, report, kind))
    lines = [line for kind, found in commands.items() for line in _limited(kind, found)]
    return "\n".join([*lines, f"precdoctor {clean(report.headline)}", ""])


def command(kind: str, message: str, **properties: str | int) -> str:
    """A workflow command, ``::error file=train.py,line=42,title=PD101::message``; special characters are escaped."""
    escaped = {name: _data(clean(str(v))).replace(":", "%3A").replace(",", "%2C") for name, v in properties.items()}
    fields = ",".join(f"{name}={value}" for name, value in escaped.items())
    return f"::{kind}{' ' + fields if fields else ''}::{_data(message)}"


def _annotation(finding: Finding, report: Report, kind: str) -> str:
    place_of = file_line(finding, report.diagnosis)
    properties: dict[str, str | int] = {}
    if place_of is not None:
        properties = {"file": place_of.file, "line": place_of.line}
    where = place(finding)
    body = "\n".join(
        [
            finding.title,
            finding.message,
            *([f"where: {where}"] if where else []),
            *(f"do: {p.title}" for p in finding.prescriptions),
        ]
    )
    return command(kind, body, **properties, title=f"{finding.code} {finding.name}")


def _limited(kind: str, found: list[str]) -> Iterator[str]:
    if len(found) <= MAX_ANNOTATIONS:
        yield from found
        return
    yield from found[: MAX_ANNOTATIONS - 1]
    rest = plural(len(found) - MAX_ANNOTATIONS + 1, f"more {kind}")
    yield command(kind, f"{rest}; GitHub shows {MAX_ANNOTATIONS} of a kind", title="precdoctor")


def _data(value: str) -> str:
    lines = [clean(line) for line in value.split("\n")]
    return "\n".join(lines).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
