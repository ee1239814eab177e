"""Renders a report as GitLab Code Quality JSON (the Code Climate subset), which GitLab shows in a merge request."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from precdoctor.reporting.outputs import Report
from precdoctor.reporting.places import file_line, identity, subject_of
from precdoctor.reporting.text import clean

_SEVERITIES = {"error": "critical", "warning": "major", "info": "info"}


def gitlab(report: Report) -> str:
    """The JSON array of findings. Fingerprints are equal from run to run, so that GitLab recognises old findings."""
    seen: Counter[str] = Counter()
    issues: list[dict[str, Any]] = []
    for finding in report.diagnosis.findings:
        place = file_line(finding, report.diagnosis)
        fingerprint = identity(finding, report.diagnosis)
        seen[fingerprint] += 1
        subject = subject_of(finding)
        issues.append(
            {
                "description": clean(f"{finding.title}{f' [{subject}]' if subject else ''}"),
                "check_name": f"{finding.code} {finding.name}",
                "fingerprint": fingerprint if seen[fingerprint] == 1 else f"{fingerprint}-{seen[fingerprint]}",
                "severity": _SEVERITIES[finding.severity.value],
                "location": {
                    "path": clean(place.file) if place is not None else "precdoctor",
                    "lines": {"begin": place.line if place is not None else 1},
                },
            }
        )
    return json.dumps(issues, indent=2, ensure_ascii=True) + "\n"
