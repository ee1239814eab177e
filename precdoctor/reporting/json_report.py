"""A diagnosis as JSON: one stable shape, described by ``schema/diagnosis-1.schema.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import precdoctor
from precdoctor.diagnosis.claims.finding import Diagnosis, jsonable

if TYPE_CHECKING:
    from precdoctor.comparison.gate import GateReport

#: Raised whenever the meaning of a key changes; new keys may appear without.
SCHEMA_VERSION = 1


def answer_head(run: Mapping[str, Any]) -> dict[str, Any]:
    """What every document about one run begins with."""
    tool = {"name": "precdoctor", "version": precdoctor.__version__}
    return {"schema_version": SCHEMA_VERSION, "tool": tool, "run": jsonable(run)}


def document(diagnosis: Diagnosis, exit_code: int) -> dict[str, Any]:
    """The report as plain JSON values; non-finite numbers are the strings "NaN", "Infinity", "-Infinity"."""
    return {
        **answer_head(diagnosis.run),
        "verdict": diagnosis.verdict,
        "exit_code": exit_code,
        "findings": [jsonable(finding) for finding in diagnosis.findings],
        "rules": [{"code": r.code, "status": r.status.value, "reason": r.reason} for r in diagnosis.rules],
        "recorder": jsonable(diagnosis.recorder),
    }


def gate_document(report: GateReport) -> dict[str, Any]:
    """A gate's report: the diagnosis of its runs in the same shape, and the checks under ``gate``."""
    checks = [jsonable(check) for check in report.checks]
    gate = {
        "runs": list(report.runs),
        "baseline": report.baseline,
        "fail_on": report.fail_on,
        "checks": checks,
        "untrustworthy": list(report.untrustworthy),
        "notes": list(report.notes),
        "suspects": list(report.suspects),
    }
    return {**document(report.diagnosis, report.exit_code), "gate": gate}


def dumps(document: dict[str, Any]) -> str:
    """Two spaces, ASCII only: recorded names cannot reach a terminal or a log as anything but escapes."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=True) + "\n"


def schema(name: str = "diagnosis") -> dict[str, Any]:
    """The published JSON Schema of :func:`document`; ``whatif``, ``shadow`` and ``trial`` are of these commands."""
    file = resources.files("precdoctor.reporting") / "schema" / f"{name}-1.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded
