"""Renders a report as JUnit XML, which every CI system reads: a suite per run, a case per rule and per comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from precdoctor.comparison.gate import GateCheck
from precdoctor.diagnosis.claims.finding import Finding, RuleOutcome, Status
from precdoctor.diagnosis.ranking.verdict import ExitCode
from precdoctor.reporting.finding_view import place
from precdoctor.reporting.outputs import Report
from precdoctor.reporting.text import clean, clean_block

#: Noncharacters that XML 1.0 does not allow; `clean` replaces control characters and surrogates.
_ILLEGAL = re.compile("[\ufffe\uffff]")


@dataclass(frozen=True)
class _Case:
    """A test case; ``outcome`` is failure, error or skipped, None for a pass."""

    classname: str
    name: str
    outcome: str | None = None
    kind: str = ""
    message: str = ""
    text: str = ""


def junit(report: Report) -> str:
    """The XML document, with its declaration.

    A finding at or above the failing level is a failure; a finding below it passes, with its text in ``system-out``. A
    rule or check that was not evaluated is skipped. A verdict that cannot be trusted (exit status 3) is an error.
    """
    if (gate := report.gate) is not None:
        suites = [(run, _checks([c for c in gate.checks if c.run == run])) for run in gate.runs]
    else:
        suites = [(str(report.diagnosis.run.get("path", "run")), _rules(report))]
    if report.exit_code == ExitCode.UNTRUSTWORTHY:
        reasons = report.distrust or ["rows were lost or the log is damaged"]
        suites[0][1].extend(_Case("precdoctor", "trustworthy verdict", "error", "untrustworthy", r, r) for r in reasons)
    root = ET.Element("testsuites", name="precdoctor")
    for name, cases in suites:
        _suite(root, name, cases)
    for attribute in ("tests", "failures", "errors"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _checks(checks: Sequence[GateCheck]) -> list[_Case]:
    cases = []
    for check in checks:
        comparison = f"expected {check.expected}, found {check.found}, limit {check.limit}"
        outcome = "failure" if check.fails else "skipped" if check.passed is None else None
        text = comparison if check.passed is False else ""
        message = check.found if check.passed is None else comparison
        name = f"{check.check}: {check.subject}"
        cases.append(_Case("precdoctor.gate", name, outcome, check.check.partition(" ")[0], message, text))
    return cases


def _rules(report: Report) -> list[_Case]:
    failing = {id(finding) for finding in report.failing}
    cases = []
    for rule in report.diagnosis.rules:
        own = [f for f in report.diagnosis.findings if f.code == rule.code]
        cases += [_of_finding(f, rule, fails=id(f) in failing) for f in own] or [_of_rule(rule)]
    rule_codes = {rule.code for rule in report.diagnosis.rules}
    for finding in report.diagnosis.findings:
        if finding.code not in rule_codes:
            outcome = RuleOutcome(finding.code, finding.name, Status.FAILED, "")
            cases.append(_of_finding(finding, outcome, fails=id(finding) in failing))
    return cases


def _of_rule(rule: RuleOutcome) -> _Case:
    name = f"{rule.code} {rule.name}"
    if rule.status in (Status.INDETERMINATE, Status.NOT_APPLICABLE):
        return _Case("precdoctor.rules", name, "skipped", rule.status.value, rule.reason)
    return _Case("precdoctor.rules", name)


def _of_finding(finding: Finding, rule: RuleOutcome, *, fails: bool) -> _Case:
    where = place(finding)
    lines = [finding.message, *([f"where: {where}"] if where else [])]
    source = finding.location.source
    lines += [f"source: {source.place}"] if source is not None else []
    lines += [f"cause: {finding.cause}"] if finding.cause else []
    lines += [f"do: {p.title}" for p in finding.prescriptions]
    name = f"{rule.code} {rule.name}" + (f": {where}" if where else "")
    outcome = "failure" if fails else None
    return _Case("precdoctor.rules", name, outcome, rule.code, finding.title, "\n".join(lines))


def _suite(root: ET.Element, name: str, cases: Sequence[_Case]) -> None:
    count = {kind: str(sum(c.outcome == kind for c in cases)) for kind in ("failure", "error", "skipped")}
    numbers = {
        "tests": str(len(cases)),
        "failures": count["failure"],
        "errors": count["error"],
        "skipped": count["skipped"],
    }
    suite = ET.SubElement(root, "testsuite", {"name": _text(name), **numbers, "time": "0"})
    for case in cases:
        element = ET.SubElement(suite, "testcase", {"classname": case.classname, "name": _text(case.name), "time": "0"})
        if case.outcome == "skipped":
            ET.SubElement(element, "skipped", {"message": _text(case.message)})
        elif case.outcome is not None:
            detail = ET.SubElement(element, case.outcome, {"type": case.kind, "message": _text(case.message)})
            detail.text = _block(case.text)
        elif case.text:
            ET.SubElement(element, "system-out").text = _block(f"{case.message}\n{case.text}")


def _text(value: str) -> str:
    return _ILLEGAL.sub("?", clean(value))


def _block(value: str) -> str:
    return _ILLEGAL.sub("?", clean_block(value))
