"""The rules while a run goes on: a window of its growing log, judged again and again from outside the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Finding, Severity, jsonable
from precdoctor.diagnosis.claims.rule import Options, Rule
from precdoctor.diagnosis.engine import diagnose_view
from precdoctor.diagnosis.registry import RULES, Named, select, select_rules
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import RunUnreadableError
from precdoctor.runlog.filters import Filters, query
from precdoctor.runlog.pieces import Piece
from precdoctor.runlog.reader import Run, open_run

#: Steps looked at, the newest: longer than any rule's own window, and what keeps the cost of a look flat.
WINDOW = 4096
#: Rules that compare with the beginning of the run; they are silent once it has left the window.
FROM_THE_START = frozenset({"PD503", "PD605"})

_Identity = tuple[str, str | None, str | None, str | None]


@dataclass(frozen=True)
class _Further:
    """A finding that is of no rule, for the names ``--halt-on`` takes."""

    code: str
    name: str


class OnlineRules:
    """Looks at a run that is being recorded, and tells what is new.

    A finding counts once two looks running have made it: what comes and goes as evidence grows is not told. The last
    look, at the closed log, is believed at once.
    """

    def __init__(
        self,
        settings: Mapping[str, Options],
        halt_on: Iterable[str] = (),
        *,
        more: Callable[[RunView], Sequence[Finding]] | None = None,
        more_codes: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
            settings: every rule's options, by code.
            halt_on: codes, names, families such as ``PD2``, or ``error`` for any finding of that level.
            more: further findings of the window, such as those against a reference.
            more_codes: code and name of those.

        Raises:
            UsageError: an unknown rule.
        """
        names = list(halt_on)
        codes = [name for name in names if name.lower() != "error"]
        known: list[Named] = [*RULES, *(_Further(code, name) for code, name in (more_codes or {}).items())]
        self._halt_codes = frozenset(rule.code for rule in select(known, codes)) if codes else frozenset()
        self._halt_errors = len(codes) < len(names)
        self._more = more or (lambda _view: ())
        self._settings = settings
        self._seen: frozenset[_Identity] = frozenset()
        self._told: set[_Identity] = set()
        self._steps = -1

    def look(self, path: Path, *, last: bool = False) -> list[Finding]:
        """The findings that are new, most important first; none while nothing can be read or nothing was added."""
        try:
            return self._look(path, last=last)
        except RunUnreadableError:  # a part was being sealed; the next look will find it whole
            return []

    def _look(self, path: Path, *, last: bool) -> list[Finding]:
        run = open_run(path)
        span = _span(run)
        if span is None or (span[1] == self._steps and not last):
            return []
        first, self._steps = span
        from_here = max(first, self._steps - WINDOW + 1)
        view = RunView(Window(run, from_here) if from_here > first else run)
        rules = self._rules(whole=from_here == first)
        found = [*diagnose_view(view, rules, self._settings).findings, *self._more(view)]
        now = {_identity(f): f for f in found}
        before, self._seen = self._seen, frozenset(now)
        new = [f for key, f in now.items() if key not in self._told and (last or key in before)]
        self._told.update(_identity(f) for f in new)
        return new

    @staticmethod
    def _rules(*, whole: bool) -> Sequence[Rule]:
        usual = select_rules()
        return usual if whole else [r for r in usual if r.code not in FROM_THE_START]

    def halts(self, finding: Finding) -> bool:
        """Whether the run is to be stopped for it; for no finding that is mere information."""
        if finding.code in self._halt_codes:
            return finding.severity is not Severity.INFO
        return self._halt_errors and finding.severity is Severity.ERROR


def as_json(finding: Finding, run: Path) -> str:
    """One line: the finding as reports have it, and the run it is about."""
    return json.dumps({"run": str(run), **jsonable(finding)}, allow_nan=False) + "\n"


def _identity(finding: Finding) -> _Identity:
    place = finding.location
    return (finding.code, place.root, place.module, place.kind)


def _span(run: Run) -> tuple[int, int] | None:
    """First and last step on record; None before there is one."""
    first, last = None, None
    for batch in run.batches("steps", columns=["step"]):
        ends = pc.min_max(batch.column(0)).as_py()
        first = ends["min"] if first is None else min(first, ends["min"])
        last = ends["max"] if last is None else max(last, ends["max"])
    return None if first is None or last is None else (first, last)


class Window(Run):
    """A run from one step on; events are few, and stay."""

    def __init__(self, run: Run, first: int) -> None:
        super().__init__(run.path, run.info)
        self._first = first

    def batches(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.RecordBatch]:
        """As of the whole run, without what came before."""
        return self._read(query(name, columns, self._narrowed(name, filters)))

    def pieces(self, table: str) -> list[Piece]:
        """As of the whole run, without what came before."""
        return [replace(p, since=self._first, rows=0) for p in super().pieces(table)]

    def _frame(self, table: str, columns: Sequence[str] | None, filters: Filters | None) -> Any:
        return super()._frame(table, columns, self._narrowed(table, filters))

    def _narrowed(self, table: str, filters: Filters | None) -> Filters | None:
        term = ("step", ">=", self._first)
        if table == "events":
            return filters
        if filters is None:
            return [term]
        if isinstance(filters, pc.Expression):
            return filters & (pc.field("step") >= self._first)
        parts = list(filters)
        if not parts or isinstance(parts[0], tuple):
            return [*parts, term]
        return [[*alternative, term] for alternative in parts]
