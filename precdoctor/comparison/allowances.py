"""The allow-list of a gate: findings and failures that a team accepts, each with a reason and a last day."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from precdoctor.comparison.lines import Line
from precdoctor.comparison.regressions import REGRESSIONS, Regression
from precdoctor.diagnosis.claims.finding import Finding, Location, Severity
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.registry import RULES, find, nearest
from precdoctor.errors import UsageError
from precdoctor.runlog.toml import read_toml

CHECK = "PD816 allowance-expired"
_MAX_BYTES = 4 << 20
_KEYS = ("code", "module", "reason", "until")


@dataclass(frozen=True)
class Allowance:
    """An entry of the allow-list.

    Attributes:
        code: code of a rule or a regression.
        module: a glob over FQNs; ``*`` also matches findings that are not about one module.
        reason: why it is accepted.
        until: the last day on which the entry is valid.
    """

    code: str
    module: str
    reason: str
    until: dt.date

    @property
    def words(self) -> str:
        """Reason and last day: ``norms in BF16, see #12 (until 2026-12-31)``."""
        return f"{self.reason} (until {self.until.isoformat()})"


def read_allowances(file: Path) -> tuple[Allowance, ...]:
    """The ``[[allow]]`` tables of a TOML file.

    Raises:
        UsageError: the file cannot be read, or an entry is invalid; the message names the entry and the key.
    """
    try:
        table = read_toml(file, _MAX_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such allow-list") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no allow-list: {error}") from None
    unknown = next((key for key in table if key != "allow"), None)
    entries = table.get("allow", [])
    if unknown is not None or not isinstance(entries, list):
        what = f"there is a key {unknown!r}" if unknown is not None else "allow is no list"
        raise UsageError(f"{file}: an allow-list holds [[allow]] tables only, and {what}")
    return tuple(_entry(f"{file}: entry {at}", entry) for at, entry in enumerate(entries, 1))


def _entry(where: str, entry: Any) -> Allowance:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is no table; write [[allow]] above its keys")
    if (unknown := next((key for key in entry if key not in _KEYS), None)) is not None:
        raise UsageError(f"{where} has no key {unknown!r}{nearest(str(unknown), _KEYS)}")
    for key in ("code", "reason"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise UsageError(f"{where} needs a {key}, as text")
    module, until = entry.get("module", "*"), entry.get("until")
    if not isinstance(module, str) or not module:
        raise UsageError(f"{where}: module is a glob over module names, such as blocks.*, got {module!r}")
    if isinstance(until, dt.datetime) or not isinstance(until, dt.date):
        raise UsageError(f"{where} needs a last day, such as until = 2026-12-31 without quotes, got {until!r}")
    known: list[Rule | Regression] = [*RULES, *REGRESSIONS]
    return Allowance(find(entry["code"], known).code, module, entry["reason"].strip(), until)


class AllowList:
    """The entries of an allow-list on one day; remembers which of them have accepted something."""

    def __init__(self, entries: Sequence[Allowance], today: dt.date) -> None:
        self._valid = [a for a in entries if today <= a.until]
        self._expired = [a for a in entries if today > a.until]
        self._today = today
        self._used: set[Allowance] = set()

    def accept_line(self, line: Line) -> Line:
        """The line; an allowed failure is reduced to information."""
        allowance = None if line.passed else self._first_match(line.code, line.module)
        return line if allowance is None else replace(line, allowed=allowance.words, severity=Severity.INFO)

    def accept_finding(self, finding: Finding) -> Finding:
        """The finding; reduced to information if it is allowed."""
        allowance = self._first_match(finding.code, finding.location.module or "")
        return finding if allowance is None else as_information(finding, "allowed", allowance.words)

    def _first_match(self, code: str, module: str) -> Allowance | None:
        allowance = next((a for a in self._valid if code == a.code and fnmatchcase(module, a.module)), None)
        self._used.update(filter(None, [allowance]))
        return allowance

    def expired_lines(self) -> list[Line]:
        """A failed line for every expired entry, whether or not it would have accepted anything."""
        return [
            Line(
                CHECK,
                f"{a.code} in {a.module}: {a.reason}",
                f"until {a.until.isoformat()}",
                f"today is {self._today.isoformat()}",
                "renew it, or remove it",
                False,
                Severity.ERROR,
                Location(),
                excess=float((self._today - a.until).days),
            )
            for a in self._expired
        ]

    def unused_notes(self) -> list[str]:
        """A remark for each valid entry that accepted nothing and can be removed."""
        idle = [a for a in self._valid if a not in self._used]
        return [f"the allow-list's {a.code} in {a.module} ({a.reason}) accepted nothing; remove it" for a in idle]


def as_information(finding: Finding, key: str, reason: str) -> Finding:
    """The finding with severity information, and ``reason`` in its evidence (under ``key``) and in its message."""
    message = f"{finding.message} {key.capitalize()}: {reason}."
    return replace(finding, severity=Severity.INFO, message=message, evidence={**finding.evidence, key: reason})
