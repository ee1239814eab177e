"""The CI verdict: the rules as pass or fail, and what got worse against a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from precdoctor.comparison.pairing import Pairing, pair
from precdoctor.comparison.regressions import REGRESSIONS, Line, Regression, findings_of
from precdoctor.diagnosis.engine import RuleOptions, diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.finding import Diagnosis, Finding, RuleOutcome, Status
from precdoctor.diagnosis.registry import RULES, select
from precdoctor.diagnosis.rule import Options, Rule
from precdoctor.diagnosis.telling import plural
from precdoctor.diagnosis.verdict import ExitCode, at_or_above, exit_code, untrustworthy, worst
from precdoctor.diagnosis.view import RunView

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run


@dataclass(frozen=True)
class GateCheck:
    """One line of a gate's report.

    Attributes:
        check: code and name.
        subject: what was looked at.
        passed: None when it could not be decided or was not applicable; ``found`` says why.
        severity: of the finding when it failed.
        fails: whether it is at or above ``--fail-on`` and so decides the exit status.
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
        diagnoses: per run, regressions among the findings (PD8xx) and rules.
        untrustworthy: per reason one sentence; not empty where a verdict cannot be trusted.
        notes: worth knowing, without weight.
    """

    runs: tuple[str, ...]
    baseline: str | None
    fail_on: str
    checks: tuple[GateCheck, ...]
    diagnoses: tuple[Diagnosis, ...]
    exit_code: int
    untrustworthy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the build may go on."""
        return self.exit_code == ExitCode.CLEAN

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of all runs, most important first within each."""
        return tuple(f for d in self.diagnoses for f in d.findings)

    @property
    def diagnosis(self) -> Diagnosis:
        """All runs as one, in the shape of the JSON report; findings name their run in ``evidence["run"]``."""
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
    baseline: Run | None = None,
    *,
    fail_on: str = "error",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    options: RuleOptions | None = None,
) -> GateReport:
    """Judge ``runs`` for CI.

    Args:
        baseline: a healthy run to hold them against.
        fail_on: ``error`` or ``warning``.
        select: rules and regressions to use (codes, names, prefixes such as ``PD8``); none means all.
        ignore: those to leave out.
        options: per rule or regression the thresholds to change.

    Raises:
        UsageError: an unknown rule, option or level.
        NothingRecordedError: a run or the baseline holds no training step.
    """
    at_or_above((), fail_on)
    rules, regressions = _chosen(list(select), list(ignore))
    settings = resolve_options(options or {}, (*RULES, *REGRESSIONS))
    base = view_of(baseline) if baseline is not None else None
    judged = [_judge(view_of(run), base, rules, regressions, settings, fail_on) for run in runs]
    code = worst(j.code for j in judged)
    notes: list[str] = []
    if base is not None:
        distrust, notes = _baseline_notes(base, rules, settings)
        code = worst([code, *([ExitCode.UNTRUSTWORTHY] if distrust else [])])
    else:
        distrust = []
    return GateReport(
        runs=tuple(str(run.path) for run in runs),
        baseline=str(baseline.path) if baseline is not None else None,
        fail_on=fail_on,
        checks=tuple(c for j in judged for c in j.checks),
        diagnoses=tuple(j.diagnosis for j in judged),
        exit_code=int(code),
        untrustworthy=tuple(r for j in judged for r in j.reasons) + tuple(distrust),
        notes=tuple(notes),
    )


def _chosen(wanted: list[str], ignored: list[str]) -> tuple[tuple[Rule, ...], tuple[Regression, ...]]:
    known: tuple[Rule | Regression, ...] = (*RULES, *REGRESSIONS)
    chosen = select(known, wanted, ignored)
    return tuple(r for r in chosen if isinstance(r, Rule)), tuple(r for r in chosen if isinstance(r, Regression))


@dataclass(frozen=True)
class _Judged:
    diagnosis: Diagnosis
    checks: list[GateCheck]
    code: ExitCode
    reasons: list[str]


def _judge(
    view: RunView,
    base: RunView | None,
    rules: Sequence[Rule],
    regressions: Sequence[Regression],
    settings: Mapping[str, Options],
    fail_on: str,
) -> _Judged:
    diagnosis = diagnose_view(view, rules, settings)
    path = str(view.run.path)
    checks = [_rule_check(path, o, diagnosis, fail_on) for o in diagnosis.rules]
    reasons = []
    incomparable = False
    if base is not None and regressions:
        pairing = pair(view, base)
        if isinstance(pairing, str):
            reasons.append(f"{path} cannot be held against the baseline: {pairing}")
            incomparable = True
        else:
            lines = {r.code: r.compare(r, pairing, settings[r.code]) for r in regressions}
            diagnosis = _with_regressions(diagnosis, regressions, lines, pairing)
            checks += [_line_check(path, line, fail_on) for group in lines.values() for line in group]
    code = exit_code(diagnosis, fail_on)
    if code is ExitCode.UNTRUSTWORTHY:
        reasons.insert(0, f"{path}: {untrustworthy(diagnosis)}")
    if incomparable:
        code = worst([code, ExitCode.UNTRUSTWORTHY])
    return _Judged(diagnosis, checks, code, reasons)


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
    diagnosis: Diagnosis, regressions: Sequence[Regression], lines: Mapping[str, Sequence[Line]], pairing: Pairing
) -> Diagnosis:
    new = findings_of([line for group in lines.values() for line in group])
    where = f"{plural(len(pairing.found), 'tensor')} on {plural(len(pairing.sampled), 'common step')}"
    outcomes = [outcome_of(r.code, r.name, lines[r.code], where) for r in regressions]
    findings = sorted([*diagnosis.findings, *new], key=lambda f: -f.severity.weight)
    return replace(diagnosis, findings=tuple(findings), rules=(*diagnosis.rules, *outcomes))


def outcome_of(code: str, name: str, lines: Sequence[Line], where: str) -> RuleOutcome:
    """What a regression came to; ``where`` says what was compared."""
    if not lines:
        return RuleOutcome(code, name, Status.NOT_APPLICABLE, f"nothing to compare among {where}")
    line = lines[0]
    reason = f"{line.subject}: expected {line.expected}, found {line.found}, limit {line.limit}; {where}"
    return RuleOutcome(code, name, Status.PASSED if all(x.passed for x in lines) else Status.FAILED, reason)


def _baseline_notes(
    base: RunView, rules: Sequence[Rule], settings: Mapping[str, Options]
) -> tuple[list[str], list[str]]:
    """Reasons not to trust the baseline as a yardstick, and remarks."""
    distrust, notes = [], []
    if base.missing is not None:
        distrust.append(f"the baseline cannot be trusted: {base.missing}")
    elif not base.complete:
        notes.append("the baseline's log was never closed; its last steps may be missing")
    own = at_or_above(diagnose_view(base, rules, settings).findings, "error")
    notes += [f"the baseline itself has {f.code} {f.name}: {f.title}" for f in own]
    return distrust, notes


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
