"""One run of a gate before anything is decided: its findings, and every comparison whether passed or failed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from precdoctor.comparison.allowances import Allowance, accept_finding, accept_lines
from precdoctor.comparison.baseline import Baseline
from precdoctor.comparison.fail_if import Limit, judge_limit
from precdoctor.comparison.lines import Line
from precdoctor.comparison.pairing import hold
from precdoctor.comparison.regressions import Regression
from precdoctor.comparison.steps import loss_window, sampled_by_all, skipped_share, typical_loss, usable_steps
from precdoctor.comparison.summary import Summary, summaries
from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import diagnose_view
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.shadow_errors import shadowed
from precdoctor.diagnosis.survey.view import RunView


@dataclass(frozen=True)
class Judged:
    """What a run came to.

    Attributes:
        lines: of all regressions and limits.
        compared: what was held against the baseline, in words; empty when nothing was.
        incomparable: why it cannot be held against the baseline; None when it can, or there is none.
    """

    diagnosis: Diagnosis
    lines: list[Line]
    compared: str = ""
    incomparable: str | None = None


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
    return Judged(diagnosis, lines, where)


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
