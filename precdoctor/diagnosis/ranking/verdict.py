"""The exit codes of a diagnosis or a gate, and the level that decides them.

    2    usage, configuration or internal error        (errors.py; never decided here)
    3    no trustworthy verdict                        nothing recorded, damaged, drops, crashed with no finding
    1    findings at or above the level
    0    clean, or below the level

Priority 2 > 3 > 1 > 0, whatever the output format. Dropped rows make any verdict untrustworthy, and so does a rule that
raised an exception. Other gaps (a command that failed, a killed run, a rule without its data) do so only if nothing was
found: a finding is valid although data are missing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, Severity, Status
from precdoctor.diagnosis.claims.rule import ENOUGH_STEPS
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.ending import ending, failed
from precdoctor.errors import UsageError

LEVELS = ("error", "warning")
#: Fewest steps with full statistics for a trustworthy "No findings".
_ENOUGH_SAMPLES = 6


class ExitCode(enum.IntEnum):
    """The exit status of the command."""

    CLEAN = 0
    FINDINGS = 1
    ERROR = 2
    UNTRUSTWORTHY = 3


def worst(codes: Iterable[int]) -> ExitCode:
    """Return the exit code of several verdicts: 2 over 3 over 1 over 0."""
    order = (ExitCode.ERROR, ExitCode.UNTRUSTWORTHY, ExitCode.FINDINGS)
    given = set(codes)
    return next((code for code in order if code in given), ExitCode.CLEAN)


def at_or_above(findings: Iterable[Finding], level: str) -> list[Finding]:
    """Return the findings of at least this severity.

    Raises:
        UsageError: ``level`` is neither ``error`` nor ``warning``.
    """
    if level not in LEVELS:
        raise UsageError(f"a level is one of {', '.join(LEVELS)}, got {level!r}")
    return [f for f in findings if f.severity.weight >= Severity(level).weight]


def untrustworthy(diagnosis: Diagnosis) -> str | None:
    """Return why "no findings" cannot be trusted for this run; None if it can."""
    dropped = diagnosis.recorder.get("dropped") or {}
    if dropped:
        return f"{sum(dropped.values()):,} rows were dropped while recording ({', '.join(sorted(dropped))})"
    if failed(diagnosis.run):
        return ending(diagnosis.run)
    lacking = [r for r in diagnosis.rules if r.status is Status.INDETERMINATE]
    if lacking:
        return f"{lacking[0].code} {lacking[0].name} could not be judged: {lacking[0].reason}"
    if not diagnosis.run.get("complete", True):
        return "the run was killed, is still running, or had no disk space left: its log was never closed"
    return None


def too_few_steps(diagnosis: Diagnosis) -> str | None:
    """Return a clause on a run that is too short for "no findings" to mean much; None for longer ones."""
    for key, least, kind in (("steps", ENOUGH_STEPS, ""), ("sampled_steps", _ENOUGH_SAMPLES, " with full statistics")):
        count = diagnosis.run.get(key)
        if isinstance(count, int) and 0 < count < least:
            return f"{plural(count, 'step')}{kind} {'is' if count == 1 else 'are'} too few to judge"
    return None


def exit_code(diagnosis: Diagnosis, level: str | None) -> ExitCode:
    """Return the exit code of one diagnosis.

    With ``level`` None it is 0, unless a rule raised an exception.
    """
    if any(r.defect for r in diagnosis.rules):
        return ExitCode.UNTRUSTWORTHY
    if level is None:
        return ExitCode.CLEAN
    if diagnosis.recorder.get("dropped"):
        return ExitCode.UNTRUSTWORTHY
    if at_or_above(diagnosis.findings, level):
        return ExitCode.FINDINGS
    return ExitCode.UNTRUSTWORTHY if untrustworthy(diagnosis) is not None else ExitCode.CLEAN
