"""Diagnosis of a run while it is recorded: another process reads the newest steps of the growing log again and again,
and reports what is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.engine import diagnose_view
from precdoctor.diagnosis.registry import RULES, Named, select
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import RunUnreadableError
from precdoctor.runlog.atomic import jsonable
from precdoctor.runlog.filters import Filters, query
from precdoctor.runlog.pieces import Piece
from precdoctor.runlog.reader import Run, open_run

#: The newest steps that a look reads: more than any rule's own window, few enough that the cost of a look stays flat.
WINDOW = 4096
#: Rules that compare with the beginning of the run; not run once the window no longer holds it.
FROM_THE_START = frozenset({"PD503", "PD605"})

_Identity = tuple[str, str | None, str | None, str | None]


class OnlineRules:
    """Diagnoses a run that is being recorded, look by look, and returns what is new.

    A finding is returned once two looks in a row made it, because some come and go as evidence grows. The findings of
    the last look, at the closed log, are returned at once.
    """

    def __init__(
        self,
        settings: Mapping[str, Options],
        halt_on: Iterable[str] = (),
        *,
        more: Callable[[RunView], Sequence[Finding]] | None = None,
        more_rules: Sequence[Named] = (),
    ) -> None:
        """Args:
            settings: every rule's options, by code.
            halt_on: codes, names, families such as ``PD2``, or ``error`` for any finding of that severity.
            more: makes further findings of the window, such as those of a comparison with a reference run.
            more_rules: code and name of these further findings, so that ``halt_on`` can name them.

        Raises:
            UsageError: an unknown rule.
        """
        names = list(halt_on)
        codes = [name for name in names if name.lower() != "error"]
        known: list[Named] = [*RULES, *more_rules]
        self._halt_codes = frozenset(rule.code for rule in select(known, codes)) if codes else frozenset()
        self._halt_errors = len(codes) < len(names)
        self._more = more or (lambda _view: ())
        self._settings = settings
        self._seen: frozenset[_Identity] = frozenset()
        self._reported: set[_Identity] = set()
        self._steps = -1

    def look(self, path: Path, *, last: bool = False) -> list[Finding]:
        """Return the new findings, most important first; empty if the log cannot be read or has no new step.

        Args:
            path: of the run directory.
            last: whether the log is closed.
        """
        try:
            return self._look(path, last=last)
        except RunUnreadableError:  # a part was being sealed; the next look will read it whole
            return []

    def _look(self, path: Path, *, last: bool) -> list[Finding]:
        run = open_run(path)
        span = _span(run)
        if span is None or (span[1] == self._steps and not last):
            return []
        first, self._steps = span
        from_here = max(first, self._steps - WINDOW + 1)
        view = RunView(Window(run, from_here) if from_here > first else run)
        rules = [r for r in RULES if from_here == first or r.code not in FROM_THE_START]
        found = [*diagnose_view(view, rules, self._settings).findings, *self._more(view)]
        now = {_identity(f): f for f in found}
        before, self._seen = self._seen, frozenset(now)
        new = [f for key, f in now.items() if key not in self._reported and (last or key in before)]
        self._reported.update(_identity(f) for f in new)
        return new

    def halts(self, finding: Finding) -> bool:
        """Return whether ``--halt-on`` stops the run because of this finding; never for severity ``info``."""
        if finding.code in self._halt_codes:
            return finding.severity is not Severity.INFO
        return self._halt_errors and finding.severity is Severity.ERROR


def as_json(finding: Finding, run: Path) -> str:
    """Return one line of JSON: the path of the run, and the finding with the keys of a report."""
    return json.dumps({"run": str(run), **jsonable(finding)}, allow_nan=False) + "\n"


def _identity(finding: Finding) -> _Identity:
    place = finding.location
    return (finding.code, place.root, place.module, place.kind)


def _span(run: Run) -> tuple[int, int] | None:
    """Return the first and last recorded step; None if there is none yet."""
    steps = [batch.column(0) for batch in run.batches("steps", columns=["step"]) if batch.num_rows]
    return (min(pc.min(s).as_py() for s in steps), max(pc.max(s).as_py() for s in steps)) if steps else None


class Window(Run):
    """The steps of a run from step ``first`` on, with the events of all steps: events are few."""

    def __init__(self, run: Run, first: int) -> None:
        super().__init__(run.path, run.info)
        self._first = first

    def batches(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Return the batches of :meth:`Run.batches` without the rows before the window."""
        return self._read(query(name, columns, self._window_filters(name, filters)))

    def pieces(self, table: str) -> list[Piece]:
        """Return the pieces of the whole run, each to be read from the first step of the window on."""
        return [replace(p, since=self._first, rows=0) for p in super().pieces(table)]

    def _frame(self, table: str, columns: Sequence[str] | None, filters: Filters | None) -> Any:
        return super()._frame(table, columns, self._window_filters(table, filters))

    def _window_filters(self, table: str, filters: Filters | None) -> Filters | None:
        """Add ``step >= first`` to the filters of a table that has steps."""
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
