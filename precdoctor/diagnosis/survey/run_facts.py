"""What is known of a run before its tensors are read: facts, steps, events, and what the log lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Source
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.engines import run_all
from precdoctor.diagnosis.survey.processes import Glance, Process, glance, most_processes, representatives
from precdoctor.diagnosis.survey.rows import integer, text
from precdoctor.diagnosis.survey.step_facts import StepFacts, step_facts, together
from precdoctor.errors import RunTooLargeError, RunUnreadableError
from precdoctor.runlog.costs import rows_cost
from precdoctor.runlog.filters import ATTEMPT
from precdoctor.runlog.pieces import Piece, piece_rows
from precdoctor.runlog.reader import RankLog, Run, advice
from precdoctor.runlog.schema import TABLES

_STEP_COLUMNS = (
    *("step", "rank", "optimizer", "complete", "micro_steps", "loss", "lr", "lrs", "grad_norm", "clip_norm"),
    *("loss_scale", "clipped_before_unscale", "growth_tracker", "found_inf", "skipped", "autocast_dtype"),
    *("lost_update_fraction", "non_finite", "sampled", "recorder_ns", "wait_ns", "device_ns", "step_ns", "wall_time"),
)
#: Steps that are dictionaries at one time.
_RECORDS = 1 << 14
_T = TypeVar("_T")


class RunFacts:
    """A run without its tensors. Everything is read on first use and kept."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._memo: dict[str, Any] = {}
        #: Why the log of a process is left out, where those of others can be read.
        self.unread: dict[Process, str] = {}
        #: The steps of every process in a few numbers, where there are many.
        self.glances: list[Glance] = []

    @property
    def run(self) -> Run:
        """The run itself."""
        return self._run

    def remember(self, name: str, compute: Callable[[], _T]) -> _T:
        """``compute()``, once per view; several rules share one analysis this way."""
        if name not in self._memo:
            self._memo[name] = compute()
        result: _T = self._memo[name]
        return result

    # -- facts ----------------------------------------------------------------------------------------------------

    @cached_property
    def everyone(self) -> tuple[Process, ...]:
        """Every process that left a rank directory, by rank and attempt."""
        return tuple(sorted(Process(r.rank, r.attempt) for r in self._run.ranks))

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes that are looked at one by one: all of a few, those that stand out of many."""
        return tuple(sorted(self.step_batches))

    def facts(self, process: Process) -> Mapping[str, Any]:
        """The ``rank.json`` of one process; empty when it is missing."""
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
        return {Process(r.rank, r.attempt): r for r in self._run.ranks}

    @cached_property
    def any_facts(self) -> Mapping[str, Any]:
        """The facts of the first process that has any."""
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
        """The roots that have modules of their own: names of modules mean little where there are several."""
        return frozenset(root for root, module in self.module_classes if module)

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``, for the snippets."""
        return "cuda" if "cuda" in str(self.any_facts.get("device", "")).lower() else "cpu"

    @property
    def optimizers(self) -> Sequence[Mapping[str, Any]]:
        """The optimizers of the first process with facts."""
        return tuple(self.any_facts.get("optimizers") or ())

    def steps_before(self, process: Process) -> dict[str, int]:
        """By name, the steps that optimizers of a process had made before it; of those that had made any and count."""
        found = {
            text(o.get("name")): integer(o.get("steps_before")) for o in self.facts(process).get("optimizers") or ()
        }
        return {name: made for name, made in found.items() if made is not None and made > 0}

    # -- steps and events -----------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The ``steps`` table, ordered by process and step; ``loss_is_bad`` tells a NaN loss from a missing one."""
        columns = [*_STEP_COLUMNS, "attempt"]
        batches = [b.select(columns) for found in self.step_batches.values() for b in found]
        table = pa.Table.from_batches(batches, schema=table_columns("steps", columns)).unify_dictionaries()
        loss = table.column("loss")
        bad = pc.and_kleene(pc.is_valid(loss), pc.invert(pc.is_finite(loss)))
        frame = table.to_pandas().assign(loss_is_bad=bad.fill_null(False).to_numpy(zero_copy_only=False))
        ordered: pd.DataFrame = frame.sort_values(["rank", "attempt", "step"], kind="stable").reset_index(drop=True)
        return ordered

    @cached_property
    def step_batches(self) -> Mapping[Process, list[pa.RecordBatch]]:
        """The rows of the ``steps`` table by process."""
        pieces = {Process(p.directory.rank, p.directory.attempt): p for p in self._run.pieces("steps")}
        most = most_processes(len(pieces), sum(p.rows for p in pieces.values()))
        if len(pieces) > most:
            glances = self.glances
            looked = run_all("reading steps", glance, list(pieces.values()), self._run, list(pieces.values()))
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
                for batch in piece_rows(piece, _STEP_COLUMNS, cache=self._run.cache):
                    cost += rows_cost("steps", batch)
                    self._run.budget.keep("steps", cost)
                    own.append(batch)
            except RunTooLargeError:
                raise
            except RunUnreadableError as error:
                del steps[process]
                self._cannot_read(piece, error)
        return steps

    def _cannot_read(self, piece: Piece, error: RunUnreadableError) -> None:
        """A log of several that cannot be read is a problem of its process.

        Raises:
            RunUnreadableError: there is no other.
        """
        if len(self.everyone) == 1:
            with advice(self._run.path):
                raise error
        self.unread[Process(piece.directory.rank, piece.directory.attempt)] = str(error)

    @cached_property
    def timeline(self) -> Mapping[Process, Sequence[StepFacts]]:
        """Per process its steps in order, the rows of several optimizers at one step taken together."""
        timeline: dict[Process, list[StepFacts]] = {p: [] for p in self.processes}
        for record in self._step_records():
            facts = step_facts(record)
            steps = timeline.setdefault(Process.of(record), [])
            if steps and steps[-1].step == facts.step:
                facts = together(steps.pop(), facts)
            steps.append(facts)
        return timeline

    def _step_records(self) -> Iterator[dict[str, Any]]:
        """The rows of :attr:`steps`, some thousands at a time: a dictionary takes ten times as much as its facts."""
        for start in range(0, len(self.steps), _RECORDS):
            yield from records(self.steps.iloc[start : start + _RECORDS])

    @cached_property
    def trains(self) -> bool:
        """Whether any step was more than a call of a model (``record --inference``)."""
        return not all(s.inference for steps in self.timeline.values() for s in steps)

    def step_facts(self, process: Process, step: int) -> StepFacts | None:
        """The facts of one step; None when it left no row."""
        table = self.remember("step-index", lambda: {(p, s.step): s for p, t in self.timeline.items() for s in t})
        return table.get((process, step))

    @cached_property
    def sampled_steps(self) -> tuple[int, ...]:
        """The steps with full statistics on at least one process."""
        return tuple(sorted({s.step for steps in self.timeline.values() for s in steps if s.sampled}))

    @cached_property
    def events(self) -> pd.DataFrame:
        """The ``events`` table; its ``data`` column is JSON text."""
        return self._run.events()

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds in order of time, ``data`` decoded (an undecodable one is empty)."""
        if self.events.empty:
            return []
        chosen = self.events[self.events["event"].isin(kinds)]
        return [{**r, "data": _decoded(r.get("data"))} for r in records(chosen)]

    def warnings_about(self, what: str) -> list[tuple[Process, dict[str, Any]]]:
        """The ``warning`` events with this ``what`` in their ``data``, each with its process, in order of time."""
        return [(Process.of(e), e) for e in self.events_of("warning") if e["data"].get("what") == what]

    @cached_property
    def nonfinite_events(self) -> Sequence[Mapping[str, Any]]:
        """The ``nonfinite`` events: the steps on which the recorder saw such values."""
        return self.events_of("nonfinite")

    @cached_property
    def last_step(self) -> int:
        """The last step of any process; 0 without steps."""
        return max((s.step for steps in self.timeline.values() for s in steps), default=0)

    def detection(self, process: Process, step: int) -> Source | None:
        """The line of the ``backward()`` call (or optimizer step) at which the recorder saw the values of ``step``."""
        for event in self.nonfinite_events:
            same = integer(event.get("step")) == step and integer(event.get("rank")) == process.rank
            line = integer(event.get("line"))
            if same and text(event.get("file")) and line is not None:
                return Source.read(text(event["file"]), line, text(event.get("code")))
        return None

    # -- what the log does not know -------------------------------------------------------------------------------

    @cached_property
    def dropped(self) -> Mapping[str, int]:
        """Rows lost on the way to disk, by the reason the recorder gave."""
        dropped: dict[str, int] = {}
        for event in self.events_of("drop"):
            reason = text(event["data"].get("reason")) or "unknown"
            dropped[reason] = dropped.get(reason, 0) + (integer(event["data"].get("rows")) or 0)
        return dropped

    @cached_property
    def recorder_errors(self) -> tuple[str, ...]:
        """What the recorder itself stumbled over."""
        messages = []
        for event in self.events_of("error"):
            data = event["data"]
            messages.append(text(data.get("message")) or text(data.get("error")) or json.dumps(data, sort_keys=True))
        return tuple(messages)

    @property
    def problems(self) -> tuple[str, ...]:
        """What the reader found wrong with the files; a log without its end is told by :attr:`complete`."""
        known = [str(p) for rank in self._run.ranks for p in rank.problems]
        return (*known, *(f"{why}; it is left out" for _, why in sorted(self.unread.items())))

    @cached_property
    def complete(self) -> bool:
        """Whether every process closed its log."""
        return bool(self._run.ranks) and all(rank.complete for rank in self._run.ranks)

    @cached_property
    def cut_short(self) -> str | None:
        """Why recording ended before the training did; None when it did not."""
        return next((rank.cut_short for rank in self._run.ranks if rank.cut_short is not None), None)

    @cached_property
    def stopped(self) -> str | None:
        """Why precdoctor itself ended the run; None when it did not."""
        return next((rank.stopped for rank in self._run.ranks if rank.stopped is not None), None)

    @property
    def missing(self) -> str | None:
        """Why a rule that found nothing must not say "passed"; None when the log is whole."""
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
        """Whether ``--include``/``--exclude`` left modules out, so that a producer may be invisible."""
        options = self._run.info.get("options") or self._run.info.get("recorder") or {}
        return bool(isinstance(options, Mapping) and (options.get("include") or options.get("exclude")))


def table_columns(table: str, columns: Sequence[str]) -> pa.Schema:
    """The schema of these columns of a table, ``attempt`` included where it is one of them."""
    return pa.schema([ATTEMPT if c == ATTEMPT.name else TABLES[table].field(c) for c in columns])


def _decoded(data: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(data) if isinstance(data, str) else data
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}
