"""What the rules see of a run: its facts and steps, and the survey of its tensors.

The ``tensors`` table is read once, into a survey (see :mod:`.survey`), and rules scan the rows that the survey kept.
Rows of other steps are read from the log when a rule asks for them by step. Memory does not grow with the length of the
run, except for the ``steps`` table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from precdoctor.diagnosis.survey import stored
from precdoctor.diagnosis.survey.arrow_rows import KeptRows
from precdoctor.diagnosis.survey.engines import run_all
from precdoctor.diagnosis.survey.measures import MEASURES
from precdoctor.diagnosis.survey.processes import Process
from precdoctor.diagnosis.survey.rows import ROW_COLUMNS, Parameter, TensorRow, grouped
from precdoctor.diagnosis.survey.run_facts import RunFacts, table_columns
from precdoctor.diagnosis.survey.survey import (
    Survey,
    Task,
    chosen_steps,
    concatenated,
    merged_surveys,
    read_pieces,
    tasks_of,
)
from precdoctor.runlog.caps import MAX_STEP_ROWS, hold
from precdoctor.runlog.costs import TENSOR_COST
from precdoctor.runlog.filters import query
from precdoctor.runlog.pieces import Piece
from precdoctor.runlog.reader import Run

__all__ = ["BAD_COUNTS", "IDENTITY", "Process", "RunView", "remembered"]

#: The columns that count non-finite elements.
BAD_COUNTS = ("nan", "pos_inf", "neg_inf")
#: What identifies a tensor across steps and ranks.
IDENTITY = ("root", "module", "kind", "name", "call")
#: Cache of :meth:`RunView.rows`, since rules ask for the same steps: newest steps always kept; limit on rows of more.
_KEPT_STEPS, _KEPT_ROWS = 8, 1 << 15
_P = ParamSpec("_P")
_T = TypeVar("_T")


class RunView(RunFacts):
    """A run as the rules see it. Everything is read on first use and kept."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._rows: dict[tuple[Process, int], tuple[TensorRow, ...]] = {}
        self._row_count = 0
        self._requested_steps: frozenset[int] = frozenset()
        self._extra_steps: list[int] = []

    def measured(
        self,
        measures: Sequence[str],
        kinds: Sequence[str],
        *,
        columns: Sequence[str] = (),
        steps: Sequence[int] | None = None,
        where: Sequence[tuple[str, str, Any]] = (),
    ) -> pd.DataFrame:
        """Return the rows of these kinds in the log's order: identity, ``columns``, and one column per measure.

        Args:
            measures: names of :data:`.measures.MEASURES`.
            kinds, steps, where: as for :meth:`batches`.
            columns: further columns of the ``tensors`` table.
        """
        needed = [c for m in measures for c in MEASURES[m].columns]
        wanted = list(dict.fromkeys(["step", "rank", "attempt", *IDENTITY, *columns, *needed]))
        if self.survey.covers(steps) and self._kept_rows.holds(wanted):
            frame = self._kept_rows.select(query("tensors", wanted, [self._terms(kinds, steps, where)]))
        else:
            batches = list(self.batches(wanted, kinds, steps=steps, where=where))
            rows = KeptRows(concatenated(batches, table_columns("tensors", wanted)))
            frame = rows.select(query("tensors", wanted))
        for m in measures:
            frame[m] = MEASURES[m].of(frame)
        return frame

    def keep(self, steps: Sequence[int]) -> None:
        """Ask the pass over the tensors to keep the rows of these steps as well.

        They are returned only to queries that name their steps. Without effect after the pass: queries then read these
        steps from the log.
        """
        self._requested_steps |= frozenset(steps)

    def batches(
        self,
        columns: Sequence[str],
        kinds: Sequence[str],
        *,
        steps: Sequence[int] | None = None,
        where: Sequence[tuple[str, str, Any]] = (),
        everyone: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Return the rows of these kinds in the log's order, with ``columns``, ``step``, ``rank`` and ``attempt``.

        Comes from the kept rows if they hold all steps and columns, else from the log.

        Args:
            steps: only these; None means the kept steps, or all steps if the rows come from the log.
            where: further filter terms ``(column, operator, value)``; all must hold.
            everyone: return the rows of all processes, not of :attr:`processes` only.
        """
        wanted = list(dict.fromkeys(["step", "rank", "attempt", *columns]))
        terms = self._terms(kinds, steps, where)
        all_seen = not everyone or len(self.processes) == len(self.everyone)
        if all_seen and self.survey.covers(steps) and self._kept_rows.holds(wanted):
            found = query("tensors", wanted, [terms]).select(self.survey.rows)
            return iter([found] if found.num_rows else [])
        if everyone or len(self.processes) == len(self.everyone):
            return self.run.batches("tensors", columns=wanted, filters=[terms])
        ranks = grouped((process.attempt, process.rank) for process in self.processes)
        mine = [[*terms, ("attempt", "==", attempt), ("rank", "in", of)] for attempt, of in ranks.items()]
        return self.run.batches("tensors", columns=wanted, filters=mine) if mine else iter([])

    def _terms(
        self, kinds: Sequence[str], steps: Sequence[int] | None, where: Sequence[tuple[str, str, Any]]
    ) -> list[tuple[str, str, Any]]:
        """Return the filter terms of :meth:`batches`, all of which must hold."""
        terms: list[tuple[str, str, Any]] = [("kind", "in", list(kinds)), *where]
        if steps is not None:
            terms.append(("step", "in", [int(s) for s in steps]))
        elif self.survey.kept is not None and self._extra_steps:
            terms.append(("step", "not in", self._extra_steps))
        return terms

    @cached_property
    def _kept_rows(self) -> KeptRows:
        return KeptRows(self.survey.rows)

    @cached_property
    def survey(self) -> Survey:
        """The survey of the ``tensors`` table: from the cache of large logs, or made by one pass on first use."""
        facts = [s for steps in self.timeline.values() for s in steps]
        bad = sorted({s.step for s in facts if s.loss_is_bad or s.non_finite or not s.complete})
        pieces = self.run.pieces("tensors")
        mine = [Process(p.directory.rank, p.directory.attempt) in self.step_batches for p in pieces]
        rows = sum(p.rows for p, keeps in zip(pieces, mine, strict=True) if keeps)
        chosen = chosen_steps(self.sampled_steps, bad, rows)
        self._extra_steps = [] if chosen is None else sorted(self._requested_steps.difference(chosen))
        steps = None if chosen is None else sorted([*chosen, *self._extra_steps])
        key = stored.key_of(self.run, steps) if sum(p.rows for p in pieces) >= stored.WORTH_STORING else None
        known = stored.load(key) if key is not None else None
        if known is not None:
            return known
        tasks = tasks_of(zip(pieces, mine, strict=True), steps)
        whole = merged_surveys(self._surveys(tasks, pieces), self.run.budget)
        self.run.budget.keep("names", TENSOR_COST * whole.totals.num_rows)
        if key is not None and not self.unread:
            stored.store(key, whole)
        return whole

    def _surveys(self, tasks: Sequence[Task], pieces: Sequence[Piece]) -> Iterator[Survey]:
        for read in run_all("reading tensors", read_pieces, tasks, self.run, pieces):
            for piece, error in read.unread:
                self._cannot_read(piece, error)
            yield read.survey

    @cached_property
    def bad(self) -> list[dict[str, Any]]:
        """The records of :attr:`Survey.bad` for :attr:`processes`."""
        found: list[dict[str, Any]] = self.survey.bad.to_pylist()
        return [r for r in found if Process.of(r) in self.step_batches]

    @cached_property
    def kept_steps(self) -> tuple[int, ...]:
        """The sampled steps whose rows the survey kept: all of a short run, a selection of a long one."""
        kept = self.survey.kept
        if kept is None:
            return self.sampled_steps
        mine = kept.difference(self._extra_steps)
        return tuple(s for s in self.sampled_steps if s in mine)

    def _load_step(self, process: Process, step: int) -> tuple[TensorRow, ...]:
        """Read all rows of one step, from the kept rows or else from the log, in execution order."""
        where = [("step", "==", step), ("rank", "==", process.rank), ("attempt", "==", process.attempt)]
        columns = [*ROW_COLUMNS, "attempt"]
        kept = self.survey.covers([step]) and process in self.step_batches
        mine = [query("tensors", columns, where).select(self.survey.rows)] if kept else ()
        found: list[pa.RecordBatch] = []
        for batch in mine or self.run.batches("tensors", columns=columns, filters=where):
            found.append(batch)
            count = sum(b.num_rows for b in found)
            hold(count, MAX_STEP_ROWS, f"{self.run.path} holds {{}} or more tensors of step {step}")
        several = len(self.models) > 1
        rows = [TensorRow.of(r, qualified=several) for batch in found for r in batch.to_pylist()]
        return tuple(sorted(rows, key=lambda r: (r.order is None, r.order or 0)))

    def rows(self, process: Process, step: int) -> tuple[TensorRow, ...]:
        """Return all tensors of one step of one process in execution order; those of unknown order come last."""
        key = process, step
        if key not in self._rows:
            self._rows[key] = self._load_step(process, step)
            self._row_count += len(self._rows[key])
            while len(self._rows) > _KEPT_STEPS and self._row_count > _KEPT_ROWS:
                self._row_count -= len(self._rows.pop(next(iter(self._rows))))
        return self._rows[key]

    def any_rows(self, step: int) -> tuple[TensorRow, ...]:
        """Return the rows of one step from the first process that recorded it; empty if none did."""
        return next((rows for p in self.processes if (rows := self.rows(p, step))), ())

    @cached_property
    def _places(self) -> Mapping[str, frozenset[Parameter]]:
        columns = self.survey.totals.select(["kind", "root", "module", "name"]).to_pydict()
        found = grouped(
            (kind, (root, module, name)) for kind, root, module, name in zip(*columns.values(), strict=True)
        )
        return {kind: frozenset(places) for kind, places in found.items()}

    def places(self, kind: str) -> frozenset[Parameter]:
        """Return root, module and name of every tensor of this kind."""
        return self._places.get(kind, frozenset())

    def tensor_count(self, kinds: Sequence[str]) -> tuple[int, int]:
        """Count the distinct tensors of these kinds and the steps with their rows: what a rule that passes checked."""
        steps = [self.survey.steps_of[k] for k in kinds if k in self.survey.steps_of]
        return sum(len(self.places(k)) for k in kinds), len(np.unique(np.concatenate(steps))) if steps else 0


def remembered(make: Callable[Concatenate[RunView, _P], _T]) -> Callable[Concatenate[RunView, _P], _T]:
    """Decorate a function of a view to run once per view and arguments, so that rules can share an analysis."""

    @wraps(make)
    def shared(view: RunView, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (make, args, *kwargs.items())
        if key not in view.memo:
            view.memo[key] = make(view, *args, **kwargs)
        return view.memo[key]

    return shared
