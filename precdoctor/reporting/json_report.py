"""Renders a diagnosis or a gate report as JSON, in the form of ``schema/diagnosis-1.schema.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import precdoctor
from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.runlog.atomic import jsonable

if TYPE_CHECKING:
    from precdoctor.comparison.gate import GateReport

#: Incremented whenever the meaning of a key changes; new keys do not increment it.
SCHEMA_VERSION = 1


def head() -> dict[str, Any]:
    """The first keys of every document: schema version and tool."""
    return {"schema_version": SCHEMA_VERSION, "tool": {"name": "precdoctor", "version": precdoctor.__version__}}


def answer_head(run: Mapping[str, Any]) -> dict[str, Any]:
    """The first keys of every document about one run: schema version, tool, run."""
    return {**head(), "run": jsonable(run)}


def document(diagnosis: Diagnosis, exit_code: int) -> dict[str, Any]:
    """A diagnosis as JSON values; non-finite numbers are the strings "NaN", "Infinity", "-Infinity"."""
    return {
        **answer_head(diagnosis.run),
        "verdict": diagnosis.verdict,
        "exit_code": exit_code,
        "findings": [jsonable(finding) for finding in diagnosis.findings],
        "rules": [{"code": r.code, "status": r.status.value, "reason": r.reason} for r in diagnosis.rules],
        "recorder": jsonable(diagnosis.recorder),
    }


def gate_document(report: GateReport) -> dict[str, Any]:
    """A gate's report as JSON values: the merged diagnosis of its runs, plus the checks under ``gate``."""
    names = ("runs", "baseline", "fail_on", "checks", "untrustworthy", "notes", "suspects")
    gate = {name: jsonable(getattr(report, name)) for name in names}
    return {**document(report.diagnosis, report.exit_code), "gate": gate}


def dumps(document: dict[str, Any]) -> str:
    """The document as text: indented, and ASCII only, so that recorded names cannot control a terminal."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=True) + "\n"
