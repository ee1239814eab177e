"""Renders a report as SARIF 2.1.0 (OASIS): rules with their pages, results with modules as logical locations."""

from __future__ import annotations

import json
from typing import Any

import precdoctor
from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.ranking.verdict import ExitCode
from precdoctor.diagnosis.registry import RULES
from precdoctor.reporting.outputs import Report
from precdoctor.reporting.places import file_line, identity, subject_of
from precdoctor.reporting.text import clean, clean_block
from precdoctor.runlog.atomic import jsonable

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
#: GitHub code scanning accepts at most this many results per run.
MAX_RESULTS = 5000


def sarif(report: Report) -> str:
    """The SARIF document, ASCII only."""
    findings = report.diagnosis.findings[:MAX_RESULTS]
    codes = list(dict.fromkeys(f.code for f in findings))
    driver = {
        "name": "precdoctor",
        "version": precdoctor.__version__,
        "semanticVersion": precdoctor.__version__,
        "rules": [_rule(code, next(f.name for f in findings if f.code == code)) for code in codes],
    }
    trusted = report.exit_code != ExitCode.UNTRUSTWORTHY
    invocation: dict[str, Any] = {"executionSuccessful": trusted, "exitCode": report.exit_code}
    if not trusted:
        notes = [{"level": "error", "message": {"text": clean(reason)}} for reason in report.distrust]
        invocation["toolExecutionNotifications"] = notes
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_result(f, codes.index(f.code), report) for f in findings],
    }
    document = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=True) + "\n"


def _rule(code: str, name: str) -> dict[str, Any]:
    """The SARIF entry of a rule, with the page that ``explain`` prints."""
    page = next((rule.markdown() for rule in RULES if rule.code == code), None)
    described = {"id": code, "name": name, "shortDescription": {"text": name.replace("-", " ")}}
    return described if page is None else {**described, "help": {"text": page, "markdown": page}}


def _result(finding: Finding, index: int, report: Report) -> dict[str, Any]:
    place = file_line(finding, report.diagnosis)
    location: dict[str, Any] = {}
    if place is not None:
        location["physicalLocation"] = {
            "artifactLocation": {"uri": _uri(place.file)},
            "region": {"startLine": place.line},
        }
    if subject := subject_of(finding):
        location["logicalLocations"] = [{"fullyQualifiedName": clean(subject), "kind": "module"}]
    advice = "".join(f"\nDo: {p.title}" for p in finding.prescriptions)
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity.value],
        "message": {"text": clean_block(f"{finding.title}\n{finding.message}{advice}")},
        "locations": [location] if location else [],
        "partialFingerprints": {"precdoctor/v1": identity(finding, report.diagnosis)},
        "properties": {
            "confidence": finding.confidence,
            "cause": finding.cause,
            "step": finding.location.step,
            "evidence": jsonable(finding.evidence),
        },
    }


def _uri(file: str) -> str:
    from urllib.parse import quote

    return quote(file.encode("utf-8", "surrogateescape"), safe="/")
