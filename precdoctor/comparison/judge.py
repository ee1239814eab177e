"""Runs all checks of a gate on a run: findings, and every comparison whether passed or failed.

If the candidate was run several times, each check is decided by the worst, the median or the best of the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from precdoctor.comparison.allowances import AllowList, as_information
from precdoctor.comparison.baseline import Baseline
from precdoctor.comparison.fail_if import Limit, judge_limit
from precdoctor.comparison.lines import Line
from precdoctor.comparison.pairing import pair_with_baseline
from precdoctor.comparison.regressions import Regression
from precdoctor.comparison.remarks import remarks
from precdoctor.comparison.steps import loss_window, sampled_by_all, skipped_share, typical_loss, usable_steps
from precdoctor.comparison.summary import Summary, summaries
from precdoctor.diagnosis.analyses.shadow_errors import shadowed
from precdoctor.diagnosis.claims.finding import Diagnosis, Severity
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import diagnose_view
from precdoctor.diagnosis.survey.rows import Key, grouped
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError

AGGREGATES = ("median", "best", "worst")
#: Checks that make one line per tensor. The others make one line per run, whose subject may differ between runs.
_BY_TENSOR = ("PD801", "PD802", "PD803", "PD806", "PD811", "PD812", "PD815")


@dataclass(frozen=True)
class JudgedRun:
    """The outcome of all checks on one run.

    Attributes:
        diagnosis: the findings of the rules.
        lines: the comparisons of all regressions and limits.
        compared: what was compared with the baseline, in words; empty if nothing was.
        incomparable: why the run cannot be compared with the baseline; None if it can, or there is no baseline.
        notes: remarks on the comparison, which do not decide anything.
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
) -> JudgedRun:
    """Run the rules, the regressions and the limits on one run.

    ``baseline`` is a sentence if it covers other steps than the run, None if there is none; ``settings`` are the
    options of rules and regressions, by code.
    """
    if baseline is None and limits:
        view.keep(sampled_by_all([usable_steps(view)]))
    diagnosis = diagnose_view(view, rules, settings)
    if baseline is None:
        found, run = _figures_without_baseline(view) if limits else ({}, {})
        return JudgedRun(diagnosis, _limits(limits, found, run, None, view))
    if isinstance(baseline, str):
        return JudgedRun(diagnosis, [], incomparable=baseline)
    if not regressions and not limits:
        return JudgedRun(diagnosis, [])
    pairing = pair_with_baseline(view, baseline)
    if isinstance(pairing, str):
        return JudgedRun(diagnosis, [], incomparable=pairing)
    lines = [line for r in regressions for line in r.lines(pairing, settings[r.code])]
    run = {"loss": pairing.loss, "skipped": pairing.skipped}
    lines += _limits(limits, pairing.found, run, baseline, view)
    return JudgedRun(diagnosis, lines, pairing.scope, notes=tuple(remarks(pairing, lines, regressions)))


def _figures_without_baseline(view: RunView) -> tuple[dict[Key, Summary], dict[str, float | None]]:
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


def accept(judged: JudgedRun, allowed: AllowList) -> JudgedRun:
    """``judged`` with allowed findings and lines reduced to information."""
    findings = tuple(map(allowed.accept_finding, judged.diagnosis.findings))
    lines = [allowed.accept_line(line) for line in judged.lines]
    return replace(judged, diagnosis=replace(judged.diagnosis, findings=findings), lines=lines)


def aggregated(judged: Sequence[JudgedRun], aggregate: str) -> list[JudgedRun]:
    """Reduce repeats to the deciding comparisons and findings, by ``aggregate``.

    Each comparison is kept in one run, the deciding one; a finding that too few runs have becomes information. If the
    number of runs is even, the median is the worse of the middle two. With ``worst`` all runs are returned unchanged.

    Raises:
        UsageError: ``aggregate`` is not in ``AGGREGATES``.
    """
    if aggregate not in AGGREGATES:
        raise UsageError(f"runs are aggregated by {', '.join(AGGREGATES)}, got {aggregate!r}")
    if aggregate == "worst" or len(judged) < 2:
        return list(judged)
    needed = len(judged) if aggregate == "best" else (len(judged) + 1) // 2
    kept = _deciding_lines(judged, needed)
    return [
        replace(_outvoted(one, judged, needed), lines=[line for line in one.lines if id(line) in kept])
        for one in judged
    ]


def _deciding_lines(judged: Sequence[JudgedRun], needed: int) -> set[int]:
    """``id`` of the deciding line of each check and subject: the ``needed``-th worst of the runs' lines."""
    every = (line for one in judged for line in one.lines)
    groups = grouped(((line.check, line.subject if line.code in _BY_TENSOR else ""), line) for line in every)
    deciding = set()
    for lines in groups.values():
        ranked = sorted(lines, key=lambda line: (line.passed, -line.excess))
        deciding.add(id(ranked[min(needed, len(ranked)) - 1]))
    return deciding


def _outvoted(one: JudgedRun, judged: Sequence[JudgedRun], needed: int) -> JudgedRun:
    findings = []
    for finding in one.diagnosis.findings:
        having = sum(any(f.code == finding.code for f in other.diagnosis.findings) for other in judged)
        if having < needed and finding.severity is not Severity.INFO:
            reason = f"{plural(len(judged) - having, 'run')} of {len(judged):,} do not have it"
            findings.append(as_information(finding, "outvoted", reason))
        else:
            findings.append(finding)
    return replace(one, diagnosis=replace(one.diagnosis, findings=tuple(findings)))
