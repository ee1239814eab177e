"""What is known of a run without reading its tensors: ``rank.json`` facts, steps, events, and what the log lacks."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Source
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.engines import run_all
from precdoctor.diagnosis.survey.processes import Glance, Process, glance, most_processes, representatives
from precdoctor.diagnosis.survey.rows import integer, source_of, text
from precdoctor.diagnosis.survey.step_facts import StepFacts, merged_facts, step_facts
from precdoctor.errors import RunTooLargeError, RunUnreadableError
from precdoctor.runlog.costs import rows_cost
from precdoctor.runlog.filters import ATTEMPT
from precdoctor.runlog.pieces import Piece, piece_rows
from precdoctor.runlog.reader import RankLog, Run, advice
from precdoctor.runlog.schema import TABLES

_STEP_COLUMNS = (
    *("step", "rank", "optimizer", "complete", "micro_steps", "loss", "lr", "lrs", "grad_norm", "clip_norm"),
    *("loss_scale", "clipped_before_unscale", "growth_tracker", "found_inf", "skipped", "autocast_dtype"),
    *("non_finite", "sampled", "recorder_ns", "wait_ns", "step_ns", "wall_time"),
)
#: Rows of the ``steps`` table that are turned into dictionaries at a time.
_RECORDS = 1 << 14


class RunFacts:
    """The facts, steps and events of a run. Everything is read on first use and cached."""

    def __init__(self, run: Run) -> None:
        self.run = run
        #: Results of the functions that :func:`.view.remembered` decorates, by function and arguments.
        self.memo: dict[Hashable, Any] = {}
        self._decoded_events: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        #: Processes whose logs cannot be read and are left out, with the error.
        self.unread: dict[Process, str] = {}
        #: A summary of the steps of each process, if there are more processes than are read in full.
        self.glances: list[Glance] = []

    # -- facts ----------------------------------------------------------------------------------------------------

    @cached_property
    def everyone(self) -> tuple[Process, ...]:
        """Every process that left a rank directory, by rank and attempt."""
        return tuple(sorted(Process(r.rank, r.attempt) for r in self.run.ranks))

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes whose steps and rows are read one by one: all of them, or of many the outliers and a sample."""
        return tuple(sorted(self.step_batches))

    def facts(self, process: Process) -> Mapping[str, Any]:
        """Return the ``rank.json`` of one process; empty if it is missing or unreadable.

        Raises:
            RunTooLargeError: it takes more memory than the cap.
            RunUnreadableError: it is unreadable and the run has no other process.
        """
        found = self._logs.get(process)
        try:
            return {} if found is None else found.facts
        except RunTooLargeError:
            raise
        except RunUnreadableError as error:
            if len(self.everyone) == 1:
                raise
            self.unread[process] = str(error)
            return {}

    @cached_property
    def _logs(self) -> Mapping[Process, RankLog]:
        return {Process(r.rank, r.attempt): r for r in self.run.ranks}

    @cached_property
    def any_facts(self) -> Mapping[str, Any]:
        """The ``rank.json`` of the first process that has one."""
        return next((f for f in map(self.facts, self.processes) if f), {})

    @cached_property
    def module_classes(self) -> Mapping[tuple[str, str], str]:
        """``(root, FQN) -> class`` over all processes; the root itself has the FQN ``""``."""
        classes: dict[tuple[str, str], str] = {}
        for process in self.processes:
            for root in self.facts(process).get("roots") or ():
                classes[text(root.get("name")), ""] = text(root.get("class"))
                for module in root.get("modules") or ():
                    classes[text(root.get("name")), text(module.get("name"))] = text(module.get("class"))
        return classes

    @cached_property
    def models(self) -> frozenset[str]:
        """The roots that have submodules. If there are several, messages name the root beside a module."""
        return frozenset(root for root, module in self.module_classes if module)

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``, for the snippets."""
        return "cuda" if "cuda" in str(self.any_facts.get("device", "")).lower() else "cpu"

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """The optimizers in the ``rank.json`` of the first process that has one."""
        return tuple(self.any_facts.get("optimizers") or ())

    def steps_before(self, process: Process) -> dict[str, int]:
        """Return ``{optimizer: steps}`` that a process's optimizers had made before recording began.

        Optimizers that had made none, or that keep no count, are left out.
        """
        found = {
            text(o.get("name")): integer(o.get("steps_before")) for o in self.facts(process).get("optimizers") or ()
        }
        return {name: made for name, made in found.items() if made is not None and made > 0}

    # -- steps and events -----------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The ``steps`` table, ordered by process and step, with ``loss_is_bad``: the loss is known and non-finite."""
        columns = [*_STEP_COLUMNS, "attempt"]
        batches = [b.select(columns) for found in self.step_batches.values() for b in found]
        table = pa.Table.from_batches(batches, schema=table_columns("steps", columns)).unify_dictionaries()
        loss = table.column("loss")
        bad = pc.and_kleene(pc.is_valid(loss), pc.invert(pc.is_finite(loss)))
        frame = table.to_pandas().assign(loss_is_bad=bad.fill_null(False).to_numpy(zero_copy_only=False))
        return frame.sort_values(["rank", "attempt", "step"], kind="stable").reset_index(drop=True)

    @cached_property
    def step_batches(self) -> Mapping[Process, list[pa.RecordBatch]]:
        """The rows of the ``steps`` table of each of :attr:`processes`."""
        pieces = {Process(p.directory.rank, p.directory.attempt): p for p in self.run.pieces("steps")}
        most = most_processes(len(pieces), sum(p.rows for p in pieces.values()))
        if len(pieces) > most:
            glances = self.glances
            looked = run_all("reading steps", glance, list(pieces.values()), self.run, list(pieces.values()))
            for piece, found in zip(pieces.values(), looked, strict=True):
                if isinstance(found, RunUnreadableError):
                    self._cannot_read(piece, found)
                else:
                    glances.append(found)
            pieces = {p: pieces[p] for p in representatives(glances, most)}
        steps: dict[Process, list[pa.RecordBatch]] = {}
        cost = 0
        for process, piece in pieces.items():
            own = steps[process] = []
            try:
                for batch in piece_rows(piece, _STEP_COLUMNS, cache=self.run.cache):
                    cost += rows_cost("steps", batch)
                    self.run.budget.keep("steps", cost)
                    own.append(batch)
            except RunTooLargeError:
                raise
            except RunUnreadableError as error:
                del steps[process]
                self._cannot_read(piece, error)
        return steps

    def _cannot_read(self, piece: Piece, error: RunUnreadableError) -> None:
        """Leave a process whose log cannot be read out of the analysis, and note the error in :attr:`unread`.

        Raises:
            RunUnreadableError: the run has no other process.
        """
        if len(self.everyone) == 1:
            with advice(self.run.path):
                raise error
        self.unread[Process(piece.directory.rank, piece.directory.attempt)] = str(error)

    @cached_property
    def timeline(self) -> Mapping[Process, Sequence[StepFacts]]:
        """The steps of each process in order; several rows of one step (several optimizers) are merged."""
        timeline: dict[Process, list[StepFacts]] = {p: [] for p in self.processes}
        for record in self._step_records():
            facts = step_facts(record)
            steps = timeline.setdefault(Process.of(record), [])
            if steps and steps[-1].step == facts.step:
                facts = merged_facts(steps.pop(), facts)
            steps.append(facts)
        return timeline

    def _step_records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of :attr:`steps`, converted in slices: dictionaries take ten times the memory of facts."""
        for start in range(0, len(self.steps), _RECORDS):
            yield from records(self.steps.iloc[start : start + _RECORDS])

    @cached_property
    def trains(self) -> bool:
        """Whether any step trained; False for a recording of model calls only (``record --inference``)."""
        return not all(s.inference for steps in self.timeline.values() for s in steps)

    def step_facts(self, process: Process, step: int) -> StepFacts | None:
        """Return the facts of one step; None if the log has no row of it."""
        return self._step_index.get((process, step))

    @cached_property
    def _step_index(self) -> Mapping[tuple[Process, int], StepFacts]:
        return {(p, s.step): s for p, steps in self.timeline.items() for s in steps}

    @cached_property
    def sampled_steps(self) -> tuple[int, ...]:
        """The steps with full statistics on at least one process."""
        return tuple(sorted({s.step for steps in self.timeline.values() for s in steps if s.sampled}))

    @cached_property
    def events(self) -> pd.DataFrame:
        """The ``events`` table; its ``data`` column is JSON text."""
        return self.run.events()

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds by process and time, ``data`` decoded from JSON (empty if it is invalid)."""
        chosen = [numbered for kind in dict.fromkeys(kinds) for numbered in self._events_of_kind(kind)]
        return [dict(event) for _, event in sorted(chosen, key=itemgetter(0))]

    def _events_of_kind(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the events of one kind, decoded once, each with its row number."""
        if self.events.empty:
            return []
        if kind not in self._decoded_events:
            rows = np.flatnonzero(self.events["event"] == kind)
            events = records(self.events.iloc[rows])
            decoded = [{**e, "data": _decoded(e.get("data"))} for e in events]
            self._decoded_events[kind] = list(zip(rows.tolist(), decoded, strict=True))
        return self._decoded_events[kind]

    def warnings_about(self, what: str) -> list[tuple[Process, dict[str, Any]]]:
        """Return the ``warning`` events whose ``data`` has this ``what``, with their processes, by process and time."""
        return [(Process.of(e), e) for e in self.events_of("warning") if e["data"].get("what") == what]

    @cached_property
    def nonfinite_events(self) -> Sequence[Mapping[str, Any]]:
        """The ``nonfinite`` events: one per step on which the recorder saw non-finite values."""
        return self.events_of("nonfinite")

    @cached_property
    def last_step(self) -> int:
        """The last step of any process; 0 without steps."""
        return max((s.step for steps in self.timeline.values() for s in steps), default=0)

    def detection(self, process: Process, step: int) -> Source | None:
        """Return the line of the ``backward()`` call (or optimizer step) at which the recorder detected the non-finite
        values of ``step``; None if it is not recorded.
        """
        at = process.rank, step
        own = (e for e in self.nonfinite_events if (integer(e.get("rank")), integer(e.get("step"))) == at)
        return next((source for e in own if (source := source_of(e)) is not None), None)

    # -- what the log does not know -------------------------------------------------------------------------------

    @cached_property
    def dropped(self) -> Mapping[str, int]:
        """Number of rows lost on the way to disk, by the recorder's reason."""
        dropped: dict[str, int] = {}
        for event in self.events_of("drop"):
            reason = text(event["data"].get("reason")) or "unknown"
            dropped[reason] = dropped.get(reason, 0) + (integer(event["data"].get("rows")) or 0)
        return dropped

    @cached_property
    def recorder_errors(self) -> tuple[str, ...]:
        """The messages of the recorder's internal errors."""
        errors = (event["data"] for event in self.events_of("error"))
        return tuple(text(e.get("message")) or text(e.get("error")) or json.dumps(e, sort_keys=True) for e in errors)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the files of the log, as messages; see :attr:`complete` for a log without its end."""
        known = [str(p) for rank in self.run.ranks for p in rank.problems]
        return (*known, *(f"{why}; it is left out" for _, why in sorted(self.unread.items())))

    @cached_property
    def complete(self) -> bool:
        """Whether every process closed its log."""
        return bool(self.run.ranks) and all(rank.complete for rank in self.run.ranks)

    @cached_property
    def cut_short(self) -> str | None:
        """Why recording ended before the training did; None if it did not."""
        return next((rank.cut_short for rank in self.run.ranks if rank.cut_short is not None), None)

    @cached_property
    def stopped(self) -> str | None:
        """Why precdoctor itself ended the run; None if it did not."""
        return next((rank.stopped for rank in self.run.ranks if rank.stopped is not None), None)

    @property
    def missing(self) -> str | None:
        """Why rows are missing, so that a rule without findings is indeterminate, not passed; None if none are."""
        if self.dropped:
            return f"{sum(self.dropped.values()):,} rows were dropped ({', '.join(sorted(self.dropped))})"
        if self.recorder_errors:
            return f"the recorder failed: {self.recorder_errors[0]}"
        if self.cut_short is not None:
            return f"recording ended before the training did: {self.cut_short}"
        if self.unread:
            return f"the log of {plural(len(self.unread), 'rank')} cannot be read"
        lost = [p for p in self.problems if p.endswith("is listed and missing")]
        if lost:
            return f"the log is damaged: {lost[0]}"
        return None

    @cached_property
    def partial_modules(self) -> bool:
        """Whether ``--include`` or ``--exclude`` left modules out, so that the producer may be one without rows."""
        options = self.run.info.get("options") or self.run.info.get("recorder") or {}
        return bool(isinstance(options, Mapping) and (options.get("include") or options.get("exclude")))


def table_columns(table: str, columns: Sequence[str]) -> pa.Schema:
    """Return the schema of these columns of a table; ``attempt`` is allowed, though no table stores it."""
    return pa.schema([ATTEMPT if c == ATTEMPT.name else TABLES[table].field(c) for c in columns])


def _decoded(data: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(data) if isinstance(data, str) else data
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}
