"""The runs of a gate before anything is decided: findings, and every comparison whether passed or failed.

Of several repeats of one candidate each check is decided by the worst, the median or the best of them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from precdoctor.comparison.allowances import Allowance, accept_finding, accept_lines, demoted
from precdoctor.comparison.baseline import Baseline
from precdoctor.comparison.fail_if import Limit, judge_limit
from precdoctor.comparison.lines import Line
from precdoctor.comparison.pairing import hold
from precdoctor.comparison.regressions import Regression
from precdoctor.comparison.remarks import remarks
from precdoctor.comparison.steps import loss_window, sampled_by_all, skipped_share, typical_loss, usable_steps
from precdoctor.comparison.summary import Summary, summaries
from precdoctor.diagnosis.claims.finding import Diagnosis, Severity
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import diagnose_view
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.shadow_errors import shadowed
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError

AGGREGATES = ("median", "best", "worst")
#: Checks with a line per tensor; of the others each run has one, for whatever tensor it found.
_BY_TENSOR = ("PD801", "PD802", "PD803", "PD806", "PD811", "PD812", "PD815")


@dataclass(frozen=True)
class Judged:
    """What a run came to.

    Attributes:
        lines: of all regressions and limits.
        compared: what was held against the baseline, in words; empty when nothing was.
        incomparable: why it cannot be held against the baseline; None when it can, or there is none.
        notes: what the comparison lacks or what else differs, without weight.
    """

    diagnosis: Diagnosis
    lines: list[Line]
    compared: str = ""
    incomparable: str | None = None
    notes: tuple[str, ...] = ()


def judge(
    view: RunView,
    baseline: Baseline | str | None,
    rules: Sequence[Rule],
    regressions: Sequence[Regression],
    settings: Mapping[str, Options],
    limits: Sequence[Limit],
) -> Judged:
    """Run the rules, the regressions and the limits.

    Args:
        baseline: for this run; a sentence when it covers other steps, None without one.
    """
    if baseline is None and limits:
        view.keep(sampled_by_all([usable_steps(view)]))
    diagnosis = diagnose_view(view, rules, settings)
    if baseline is None:
        found, run = _alone(view) if limits else ({}, {})
        return Judged(diagnosis, _limits(limits, found, run, None, view))
    if isinstance(baseline, str):
        return Judged(diagnosis, [], incomparable=baseline)
    if not regressions and not limits:
        return Judged(diagnosis, [])
    pairing = hold(view, baseline)
    if isinstance(pairing, str):
        return Judged(diagnosis, [], incomparable=pairing)
    lines = [line for r in regressions for line in r.compare(r, pairing, settings[r.code])]
    run = {"loss": pairing.loss, "skipped": pairing.skipped}
    lines += _limits(limits, pairing.found, run, baseline, view)
    where = f"{plural(len(pairing.found), 'tensor')} on {plural(len(pairing.sampled), 'common step')}"
    return Judged(diagnosis, lines, where, notes=tuple(remarks(pairing, lines, regressions)))


def _alone(view: RunView) -> tuple[dict[Key, Summary], dict[str, float | None]]:
    usable = usable_steps(view)
    steps = sorted(usable)
    sampled = sampled_by_all([usable])
    run = {"loss": typical_loss(view, loss_window(steps)), "skipped": skipped_share(view, steps)}
    return (summaries(view, sampled) if sampled else {}), run


def _limits(
    limits: Sequence[Limit],
    found: Mapping[Key, Summary],
    run: Mapping[str, float | None],
    baseline: Baseline | None,
    view: RunView,
) -> list[Line]:
    return [line for limit in limits for line in judge_limit(limit, found, run, baseline, shadowed(view))]


def accept(judged: Judged, allowances: Sequence[Allowance], today: dt.date, used: set[Allowance]) -> Judged:
    """The same with what is allowed turned into information."""
    findings = [accept_finding(f, allowances, today, used) for f in judged.diagnosis.findings]
    lines = accept_lines(judged.lines, allowances, today, used)
    return replace(judged, diagnosis=replace(judged.diagnosis, findings=tuple(findings)), lines=lines)


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
            groups.setdefault((line.check, line.subject if line.code in _BY_TENSOR else ""), []).append(line)
    deciding = set()
    for lines in groups.values():
        ranked = sorted(lines, key=lambda line: (line.passed, -line.excess))
        deciding.add(id(ranked[min(needed, len(ranked)) - 1]))
    return deciding


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
