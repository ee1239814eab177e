"""Reaches the CI verdict of ``precdoctor gate``: rules as pass or fail, and regressions against a baseline."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precdoctor.comparison.allowances import Allowance, AllowList
from precdoctor.comparison.baseline import Baseline, learn_repeats, provenance
from precdoctor.comparison.fail_if import Limit
from precdoctor.comparison.judge import JudgedRun, accept, aggregated, judge
from precdoctor.comparison.lines import Line, findings_of, reported_lines, suspects
from precdoctor.comparison.regressions import REGRESSIONS, Regression
from precdoctor.comparison.remarks import provenance_differences
from precdoctor.comparison.steps import UNSAMPLED, sampled_by_all, step_mismatch, usable_steps
from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, RuleOutcome, Status
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.engine import RuleOptions, diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.ranking.ending import ending, facts_of_end
from precdoctor.diagnosis.ranking.verdict import ExitCode, at_or_above, exit_code, too_few_steps, untrustworthy, worst
from precdoctor.diagnosis.registry import RULES, select
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.runlog.reader import Run


@dataclass(frozen=True)
class GateCheck:
    """One check of a run in a gate's report.

    Attributes:
        run: path or URL of the run.
        check: code and name.
        subject: the tensor, figure or place that was checked.
        passed: None if the check was not evaluated or not applicable; ``found`` states why.
        severity: severity of the finding if the check failed.
        fails: whether the finding is at or above ``--fail-on``, so that the build fails.
    """

    run: str
    check: str
    subject: str
    expected: str
    found: str
    limit: str
    passed: bool | None
    severity: str | None = None
    fails: bool = False


@dataclass(frozen=True)
class GateReport:
    """The verdict over all runs.

    Attributes:
        baseline: name of the baseline; None without one.
        diagnoses: one per run, its findings and rules including the regressions (PD8xx).
        untrustworthy: the reasons not to trust the verdict, one sentence each; empty if it can be trusted.
        notes: remarks that do not decide anything.
        suspects: modules that failed comparisons point at, the likeliest first; ``""`` is the root.
        baseline_runs: run directories from which the baseline was learned.
    """

    runs: tuple[str, ...]
    baseline: str | None
    fail_on: str
    checks: tuple[GateCheck, ...]
    diagnoses: tuple[Diagnosis, ...]
    exit_code: int
    untrustworthy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    baseline_runs: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the gate passes: exit code 0."""
        return self.exit_code == ExitCode.CLEAN

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all runs, run by run, the most important first within each."""
        return tuple(f for d in self.diagnoses for f in d.findings)

    @property
    def diagnosis(self) -> Diagnosis:
        """All runs in one diagnosis, for the JSON report; if several, findings name theirs in ``evidence["run"]``."""
        if len(self.diagnoses) == 1:
            return self.diagnoses[0]
        findings = [
            replace(f, evidence={**f.evidence, "run": run})
            for run, d in zip(self.runs, self.diagnoses, strict=True)
            for f in d.findings
        ]
        outcomes: dict[str, RuleOutcome] = {}
        for d in self.diagnoses:
            for outcome in d.rules:
                known = outcomes.get(outcome.code)
                if known is None or _STATUS_ORDER.index(outcome.status) < _STATUS_ORDER.index(known.status):
                    outcomes[outcome.code] = outcome
        return Diagnosis(
            run={"path": ", ".join(self.runs), "runs": [dict(d.run) for d in self.diagnoses]},
            findings=tuple(sorted(findings, key=lambda f: -f.severity.weight)),
            rules=tuple(outcomes.values()),
            recorder=_merged_recorder([d.recorder for d in self.diagnoses]),
        )


_STATUS_ORDER = (Status.FAILED, Status.INDETERMINATE, Status.PASSED, Status.NOT_APPLICABLE)


def gate(
    runs: Sequence[Run],
    baseline: Run | Sequence[Run] | Baseline | None = None,
    *,
    fail_on: str = "error",
    aggregate: str = "worst",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    options: RuleOptions | None = None,
    limits: Sequence[Limit] = (),
    allowances: Sequence[Allowance] = (),
    today: dt.date | None = None,
) -> GateReport:
    """Check ``runs`` for CI.

    Args:
        runs: the runs of one candidate.
        baseline: one or several healthy runs, or a baseline learned from them; None: only rules and limits.
        fail_on: ``error`` or ``warning``.
        aggregate: how repeats of the candidate decide a check: by the ``worst``, the ``median`` or the ``best`` run.
        select: rules and regressions to use (codes, names, prefixes such as ``PD8``); empty means all.
        ignore: rules and regressions to leave out.
        options: changed thresholds, by rule or regression.
        limits: the team's limits, see :func:`~precdoctor.comparison.fail_if.parse_limit`.
        allowances: the allow-list, see :func:`~precdoctor.comparison.allowances.read_allowances`.
        today: the day to compare with the allowances' last days; by default today in UTC.

    Raises:
        UsageError: an unknown rule, option, level or aggregate, or a limit that matches no tensor.
        NothingRecordedError: a run or the baseline holds no training step.
        IncomparableRunsError: several baseline runs have different steps.
    """
    at_or_above((), fail_on)
    rules, regressions = _selected_checks(list(select), list(ignore))
    settings = resolve_options(options or {}, (*RULES, *REGRESSIONS))
    views = [view_of(run) for run in runs]
    yardstick = _Yardstick.of(baseline)
    judged = [judge(view, yardstick.against(view), rules, regressions, settings, limits) for view in views]
    allowed = AllowList(allowances, today or dt.datetime.now(dt.timezone.utc).date())
    judged = [accept(j, allowed) for j in aggregated(judged, aggregate)]
    if judged:
        judged[0].lines.extend(allowed.expired_lines())
    repeats = yardstick.repeats
    closed = [_run_verdict(view, j, regressions, fail_on, repeats) for view, j in zip(views, judged, strict=True)]
    distrust, notes = yardstick.judged(rules, settings)
    code = worst([*(c.code for c in closed), *([ExitCode.UNTRUSTWORTHY] if distrust else [])])
    return GateReport(
        runs=tuple(run.origin for run in runs),
        baseline=yardstick.name,
        fail_on=fail_on,
        checks=tuple(check for c in closed for check in c.checks),
        diagnoses=tuple(c.diagnosis for c in closed),
        exit_code=int(code),
        untrustworthy=tuple(r for c in closed for r in c.reasons) + tuple(distrust),
        notes=(
            *_endings(views, closed),
            *notes,
            *provenance_differences(yardstick.provenance, views[0]),
            *dict.fromkeys(note for j in judged for note in j.notes),
            *allowed.unused_notes(),
            *_short_runs(closed),
        ),
        baseline_runs=yardstick.run_names,
        suspects=tuple(suspects([line for j in judged for line in j.lines])),
    )


def _selected_checks(wanted: list[str], ignored: list[str]) -> tuple[tuple[Rule, ...], tuple[Regression, ...]]:
    known: tuple[Rule | Regression, ...] = (*RULES, *REGRESSIONS)
    chosen = select(known, wanted, ignored)
    return tuple(r for r in chosen if isinstance(r, Rule)), tuple(r for r in chosen if isinstance(r, Regression))


@dataclass(frozen=True)
class _Yardstick:
    """The reference of a gate: a learned baseline, or healthy runs to learn from, on the steps that a candidate also
    sampled.
    """

    views: tuple[RunView, ...] = ()
    learned: Baseline | None = None

    @classmethod
    def of(cls, baseline: Run | Sequence[Run] | Baseline | None) -> _Yardstick:
        if baseline is None or isinstance(baseline, Baseline):
            return cls(learned=baseline)
        several = baseline if isinstance(baseline, Sequence) else [baseline]
        return cls(views=tuple(view_of(run) for run in several))

    @property
    def name(self) -> str | None:
        """Name for reports; None without a baseline."""
        return self.learned.source if self.learned else ", ".join(v.run.origin for v in self.views) or None

    @property
    def repeats(self) -> int:
        """Number of healthy runs from which it was learned."""
        return self.learned.repeats if self.learned is not None else len(self.views)

    def against(self, view: RunView) -> Baseline | str | None:
        """The baseline for one run; a sentence if the run covers other steps; None without a baseline."""
        if self.learned is None and not self.views:
            return None
        ours = usable_steps(view)
        different = step_mismatch(ours, self.learned.steps if self.learned else usable_steps(self.views[0]))
        if different is not None:
            return different
        if self.learned is not None:
            view.keep(self.learned.sampled)
            return self.learned
        sampled = sampled_by_all([ours, *map(usable_steps, self.views)])
        if not sampled:
            return UNSAMPLED
        view.keep(sampled)
        return learn_repeats(self.views, sampled, self.name or "")

    def judged(self, rules: Sequence[Rule], settings: Mapping[str, Options]) -> tuple[list[str], list[str]]:
        """``(reasons not to trust the baseline, remarks)`` from diagnosing the baseline's own runs."""
        pairs = [_baseline_notes(view, rules, settings) for view in self.views]
        return [r for distrust, _ in pairs for r in distrust], [n for _, notes in pairs for n in notes]

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of the baseline; empty without one."""
        if self.learned is not None:
            return self.learned.provenance
        return provenance(self.views) if self.views else {}

    @property
    def run_names(self) -> tuple[str, ...]:
        """Directories of the runs from which it was learned; empty if its file does not list them."""
        runs = self.provenance.get("runs")
        return tuple(str(run) for run in runs) if isinstance(runs, list) else ()


@dataclass(frozen=True)
class _RunVerdict:
    diagnosis: Diagnosis
    checks: list[GateCheck]
    code: ExitCode
    reasons: list[str]


def _run_verdict(
    view: RunView, judged: JudgedRun, regressions: Sequence[Regression], fail_on: str, repeats: int
) -> _RunVerdict:
    """The part of one run in the verdict: diagnosis with regressions, checks, exit code, reasons for distrust."""
    path = view.run.origin
    diagnosis, lines = judged.diagnosis, reported_by_code(judged.lines, regressions)
    checks = [_rule_check(path, o, diagnosis, fail_on) for o in diagnosis.rules]
    reasons = [f"{path} cannot be held against the baseline: {judged.incomparable}"] if judged.incomparable else []
    if judged.compared or judged.lines:
        diagnosis = _with_regressions(diagnosis, regressions, lines, judged.compared, repeats)
        checks += [_line_check(path, line, fail_on) for group in lines.values() for line in group]
    code = exit_code(diagnosis, fail_on)
    if code is ExitCode.UNTRUSTWORTHY:
        reasons.insert(0, f"{path}: {untrustworthy(diagnosis)}")
    if judged.incomparable:
        code = worst([code, ExitCode.UNTRUSTWORTHY])
    return _RunVerdict(diagnosis, checks, code, reasons)


def reported_by_code(lines: Sequence[Line], regressions: Sequence[Regression]) -> dict[str, list[Line]]:
    """By code of regression, the lines to report; see :func:`~precdoctor.comparison.lines.reported_lines`."""
    return {r.code: reported_lines([line for line in lines if line.code == r.code]) for r in regressions}


def _rule_check(path: str, outcome: RuleOutcome, diagnosis: Diagnosis, fail_on: str) -> GateCheck:
    own = [f for f in diagnosis.findings if f.code == outcome.code]
    heaviest = max((f.severity for f in own), key=lambda s: s.weight, default=None)
    decided = {Status.PASSED: True, Status.FAILED: False}.get(outcome.status)
    return GateCheck(
        run=path,
        check=f"{outcome.code} {outcome.name}",
        subject=_place(own[0]) if own else "whole run",
        expected="no finding",
        found=own[0].title if own else outcome.reason,
        limit=f"no {fail_on}",
        passed=decided,
        severity=heaviest.value if heaviest is not None else None,
        fails=bool(at_or_above(own, fail_on)),
    )


def _place(finding: Finding) -> str:
    location = finding.location
    step = f"step {location.step}" if location.step is not None else ""
    return ", ".join(w for w in (location.module or location.root or "", step) if w) or "whole run"


def _line_check(path: str, line: Line, fail_on: str) -> GateCheck:
    heavy = line.severity.weight >= (2 if fail_on == "warning" else 3)
    return GateCheck(
        run=path,
        check=line.check,
        subject=line.subject,
        expected=line.expected,
        found=line.found,
        limit=line.limit,
        passed=line.passed,
        severity=None if line.passed else line.severity.value,
        fails=not line.passed and heavy,
    )


def _with_regressions(
    diagnosis: Diagnosis,
    regressions: Sequence[Regression],
    lines: Mapping[str, Sequence[Line]],
    where: str,
    repeats: int,
) -> Diagnosis:
    new = findings_of([line for group in lines.values() for line in group], repeats)
    outcomes = [outcome_of(r, lines[r.code], where) for r in regressions if where or lines[r.code]]
    findings = sorted([*diagnosis.findings, *new], key=lambda f: -f.severity.weight)
    return replace(diagnosis, findings=tuple(findings), rules=(*diagnosis.rules, *outcomes))


def outcome_of(regression: Regression, lines: Sequence[Line], where: str) -> RuleOutcome:
    """The outcome of a regression from its lines, worst first; ``where`` names what was compared, for the reason."""
    code, name = regression.code, regression.name
    if not lines:
        return RuleOutcome(code, name, Status.NOT_APPLICABLE, f"nothing to compare among {where}")
    line = lines[0]
    reason = f"{line.subject}: expected {line.expected}, found {line.found}, limit {line.limit}; {where}"
    return RuleOutcome(code, name, Status.PASSED if all(x.passed for x in lines) else Status.FAILED, reason)


def _baseline_notes(
    base: RunView, rules: Sequence[Rule], settings: Mapping[str, Options]
) -> tuple[list[str], list[str]]:
    """``(reasons not to trust the baseline run, remarks)``."""
    distrust, notes = [], []
    if base.missing is not None:
        distrust.append(f"the baseline cannot be trusted: {base.missing}")
    elif not base.complete:
        notes.append("the baseline's log was never closed; its last steps may be missing")
    own = at_or_above(diagnose_view(base, rules, settings).findings, "error")
    notes += [f"the baseline itself has {f.code} {f.name}: {f.title}" for f in own]
    return distrust, notes


def _endings(views: Sequence[RunView], closed: Sequence[_RunVerdict]) -> list[str]:
    """A remark for each run whose command failed, because a comparison does not show that its last steps are missing.

    Leaves out runs whose verdict is distrusted for that reason already.
    """
    sentences = [
        ending(facts_of_end(view), f"the command of {view.run.origin}")
        for view, its in zip(views, closed, strict=True)
        if its.code is not ExitCode.UNTRUSTWORTHY or untrustworthy(its.diagnosis) != ending(its.diagnosis.run)
    ]
    return [sentence for sentence in sentences if sentence is not None]


def _short_runs(closed: Sequence[_RunVerdict]) -> list[str]:
    """A remark if a run is too short to pass for healthy."""
    few = (too_few_steps(its.diagnosis) for its in closed)
    return list(dict.fromkeys(f"{words} growth, dead layers and updates" for words in few if words))


def _merged_recorder(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, rows in (part.get("dropped") or {}).items():
            dropped[reason] = dropped.get(reason, 0) + rows
    overheads = [p["overhead_fraction"] for p in parts if p.get("overhead_fraction") is not None]
    return {
        "overhead_fraction": max(overheads, default=None),
        "dropped": dropped,
        "errors": [e for p in parts for e in p.get("errors") or ()],
    }
