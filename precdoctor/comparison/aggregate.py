"""Several repeats of one candidate: each check is decided by the worst, the median or the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from precdoctor.comparison.allowances import demoted
from precdoctor.comparison.judge import Judged
from precdoctor.comparison.lines import Line
from precdoctor.diagnosis.claims.finding import Severity
from precdoctor.diagnosis.claims.words import plural
from precdoctor.errors import UsageError

AGGREGATES = ("median", "best", "worst")
#: Checks with a line per tensor; of the others each run has one, for whatever tensor it found.
_BY_TENSOR = ("PD801", "PD802", "PD803", "PD806", "PD811", "PD812", "PD815")


def agreed(judged: Sequence[Judged], aggregate: str) -> list[Judged]:
    """The runs with only what decides: comparisons of one subject by one run, findings that enough runs have.

    Of an even number the median is the worse of the two in the middle. With ``worst`` every run stands for itself.

    Raises:
        UsageError: not an aggregate.
    """
    if aggregate not in AGGREGATES:
        raise UsageError(f"runs are aggregated by {', '.join(AGGREGATES)}, got {aggregate!r}")
    if aggregate == "worst" or len(judged) < 2:
        return list(judged)
    needed = len(judged) if aggregate == "best" else (len(judged) + 1) // 2
    kept = _deciding(judged, needed)
    return [
        replace(_outvoted(one, judged, needed), lines=[line for line in one.lines if id(line) in kept])
        for one in judged
    ]


def _deciding(judged: Sequence[Judged], needed: int) -> set[int]:
    """Of each subject the line that decides, by identity: as many runs as ``needed`` are at least that bad."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for one in judged:
        for line in one.lines:
            groups.setdefault((line.check, _subject(line)), []).append(line)
    deciding = set()
    for lines in groups.values():
        ranked = sorted(lines, key=lambda line: (line.passed, -line.excess))
        deciding.add(id(ranked[min(needed, len(ranked)) - 1]))
    return deciding


def _subject(line: Line) -> str:
    """What a comparison is about, the same in every run: a tensor, or else the check as a whole."""
    return line.subject if line.code in _BY_TENSOR else ""


def _outvoted(one: Judged, judged: Sequence[Judged], needed: int) -> Judged:
    findings = []
    for finding in one.diagnosis.findings:
        having = sum(any(f.code == finding.code for f in other.diagnosis.findings) for other in judged)
        if having < needed and finding.severity is not Severity.INFO:
            reason = f"{plural(len(judged) - having, 'run')} of {len(judged):,} do not have it"
            findings.append(demoted(finding, "outvoted", reason))
        else:
            findings.append(finding)
    return replace(one, diagnosis=replace(one.diagnosis, findings=tuple(findings)))
