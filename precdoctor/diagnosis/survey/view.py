"""What the rules see of a run: its steps, the survey of its tensors, and what the log does not know.

The ``tensors`` table is read once, into a survey (see :mod:`.survey`); rules scan the rows that it kept. Rows of other
steps are evidence: they are read from the log when somebody asks for them by step. Memory is flat in the length of the
run but for the ``steps`` table itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.finding import Source
from precdoctor.diagnosis.survey.arrow_rows import Categories, batch_records, frame_of, records
from precdoctor.diagnosis.survey.measures import MEASURES
from precdoctor.diagnosis.survey.rows import ROW_COLUMNS, TensorRow, integer, text
from precdoctor.diagnosis.survey.step_facts import StepFacts, step_facts, together
from precdoctor.diagnosis.survey.survey import ROWS, Survey, chosen_steps, survey
from precdoctor.runlog.caps import MAX_STEP_ROWS, hold
from precdoctor.runlog.filters import ATTEMPT, query
from precdoctor.runlog.schema import TABLES

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

#: Non-finite by any of the three counts; a filter in disjunctive normal form.
BAD_COUNTS = ("nan", "pos_inf", "neg_inf")

_STEP_COLUMNS = (
    *("step", "rank", "optimizer", "complete", "micro_steps", "loss", "lr", "lrs", "grad_norm", "clip_norm"),
    *("loss_scale", "clipped_before_unscale", "growth_tracker", "found_inf", "skipped", "autocast_dtype"),
    *("lost_update_fraction", "non_finite", "sampled", "recorder_ns", "wait_ns", "device_ns", "step_ns"),
)
#: What identifies a tensor across steps and ranks.
IDENTITY = ("root", "module", "kind", "name", "call")
#: Steps whose rows are kept at least, and rows that may be kept of more of them: rules ask for the same ones.
_KEPT_STEPS, _KEPT_ROWS = 8, 1 << 15
_T = TypeVar("_T")


@dataclass(frozen=True, order=True)
class Process:
    """One training process: a global rank, and which of its attempts."""

    rank: int
    attempt: int


def process_step(record: Mapping[str, Any]) -> tuple[Process, int]:
    """The process and the step of one scanned record."""
    return Process(int(record["rank"]), int(record["attempt"])), int(record["step"])


class RunView:
    """A run as the rules see it. Everything is read on first use and kept."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows: dict[tuple[Process, int], tuple[TensorRow, ...]] = {}
        self._row_count = 0
        self._memo: dict[str, Any] = {}
        self._categories: Categories = {}

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
    def processes(self) -> tuple[Process, ...]:
        """Every process that left a rank directory, by rank and attempt."""
        return tuple(sorted(Process(r.rank, r.attempt) for r in self._run.ranks))

    def facts(self, process: Process) -> Mapping[str, Any]:
        """The ``rank.json`` of one process; empty when it is missing."""
        return self._facts.get(process, {})

    @cached_property
    def _facts(self) -> Mapping[Process, Mapping[str, Any]]:
        return {Process(r.rank, r.attempt): r.facts or {} for r in self._run.ranks}

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

    # -- steps and events -----------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The ``steps`` table, ordered by process and step; ``loss_is_bad`` tells a NaN loss from a missing one."""
        table = pa.Table.from_batches(
            self._run.batches("steps", columns=[*_STEP_COLUMNS, "attempt"]),
            schema=_schema("steps", [*_STEP_COLUMNS, "attempt"]),
        ).unify_dictionaries()
        loss = table.column("loss")
        bad = pc.and_kleene(pc.is_valid(loss), pc.invert(pc.is_finite(loss)))
        frame = table.to_pandas().assign(loss_is_bad=bad.fill_null(False).to_numpy(zero_copy_only=False))
        ordered: pd.DataFrame = frame.sort_values(["rank", "attempt", "step"], kind="stable").reset_index(drop=True)
        return ordered

    @cached_property
    def timeline(self) -> Mapping[Process, Sequence[StepFacts]]:
        """Per process its steps in order, the rows of several optimizers at one step taken together."""
        timeline: dict[Process, list[StepFacts]] = {p: [] for p in self.processes}
        for record in records(self.steps):
            facts = step_facts(record)
            steps = timeline.setdefault(Process(int(record["rank"]), int(record["attempt"])), [])
            if steps and steps[-1].step == facts.step:
                facts = together(steps.pop(), facts)
            steps.append(facts)
        return timeline

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
        return [
            (Process(integer(e.get("rank")) or 0, integer(e.get("attempt")) or 0), e)
            for e in self.events_of("warning")
            if e["data"].get("what") == what
        ]

    def detection(self, process: Process, step: int) -> Source | None:
        """The line of the ``backward()`` call (or optimizer step) at which the recorder saw the values of ``step``."""
        for event in self.remember("nonfinite-events", lambda: self.events_of("nonfinite")):
            same = integer(event.get("step")) == step and integer(event.get("rank")) == process.rank
            line = integer(event.get("line"))
            if same and text(event.get("file")) and line is not None:
                return Source.read(text(event["file"]), line, text(event.get("code")))
        return None

    # -- tensors --------------------------------------------------------------------------------------------------

    def measured(
        self,
        measures: Sequence[str],
        kinds: Sequence[str],
        *,
        columns: Sequence[str] = (),
        steps: Sequence[int] | None = None,
        where: Sequence[tuple[str, str, Any]] = (),
    ) -> pd.DataFrame:
        """The rows of these kinds in the log's order: identity, ``columns``, one column per measure; lists as Arrow.

        Args:
            measures: names of :data:`.measures.MEASURES`.
            kinds, steps, where: as for :meth:`scan`.
            columns: further columns of the ``tensors`` table.
        """
        needed = [c for m in measures for c in MEASURES[m].columns]
        wanted = list(dict.fromkeys(["step", "rank", "attempt", *IDENTITY, *columns, *needed]))
        found = pa.Table.from_batches(self._batches(wanted, kinds, False, steps, where), _schema("tensors", wanted))
        frame = frame_of(found.unify_dictionaries(), self._categories)
        for m in measures:
            frame[m] = MEASURES[m].of(frame)
        return frame

    def scan(
        self,
        columns: Sequence[str],
        kinds: Sequence[str],
        *,
        bad: bool = False,
        steps: Sequence[int] | None = None,
        where: Sequence[tuple[str, str, Any]] = (),
    ) -> Iterator[pd.DataFrame]:
        """The ``tensors`` table, projected, some thousand rows at a time; always with ``step``, ``rank``, ``attempt``.

        Args:
            bad: only rows holding a NaN or an infinity.
            steps: only these steps; None: all.
            where: further terms that must hold, as the reader takes them.
        """
        for batch in self._batches(columns, kinds, bad, steps, where):
            yield batch.to_pandas()

    def scan_records(
        self,
        columns: Sequence[str],
        kinds: Sequence[str],
        *,
        steps: Sequence[int] | None = None,
        where: Sequence[tuple[str, str, Any]] = (),
    ) -> Iterator[dict[str, Any]]:
        """The same row by row: what is missing is NaN, or None for a list."""
        for batch in self._batches(columns, kinds, False, steps, where):
            yield from batch_records(batch)

    def _batches(
        self,
        columns: Sequence[str],
        kinds: Sequence[str],
        bad: bool,
        steps: Sequence[int] | None,
        where: Sequence[tuple[str, str, Any]],
    ) -> Iterator[pa.RecordBatch]:
        wanted = list(dict.fromkeys(["step", "rank", "attempt", *columns]))
        base: list[tuple[str, str, Any]] = [("kind", "in", list(kinds)), *where]
        if steps is not None:
            base.append(("step", "in", [int(s) for s in steps]))
        filters = [[*base, (count, ">", 0)] for count in BAD_COUNTS] if bad else [base]
        if self.survey.covers(steps) and set(wanted) <= set(ROWS.names):
            found = query("tensors", wanted, filters).select(self.survey.rows)
            return iter([found] if found.num_rows else [])
        return self._run.batches("tensors", columns=wanted, filters=filters)

    @cached_property
    def survey(self) -> Survey:
        """The one pass over the tensors."""
        bad = sorted(
            {
                s.step
                for steps in self.timeline.values()
                for s in steps
                if s.loss_is_bad or s.non_finite or not s.complete
            }
        )
        return survey(self._run, chosen_steps(self.sampled_steps, bad, self._run.listed_rows("tensors")))

    @cached_property
    def kept_steps(self) -> tuple[int, ...]:
        """The sampled steps whose rows are at hand: all of a short run, a choice of a long one."""
        kept = self.survey.kept
        return self.sampled_steps if kept is None else tuple(s for s in self.sampled_steps if s in kept)

    def _load_step(self, process: Process, step: int) -> tuple[TensorRow, ...]:
        where = [("step", "==", step), ("rank", "==", process.rank), ("attempt", "==", process.attempt)]
        columns = [*ROW_COLUMNS, "attempt"]
        found: list[pa.RecordBatch] = []
        if self.survey.covers([step]):
            found.append(query("tensors", columns, where).select(self.survey.rows))
        else:
            found += self._run.batches("tensors", columns=columns, filters=where)
        count = sum(b.num_rows for b in found)
        hold(count, MAX_STEP_ROWS, f"{self._run.path} holds {{}} tensors of step {step}")
        several = len(self.models) > 1
        rows = [TensorRow.of(r, qualified=several) for batch in found for r in batch.to_pylist()]
        return tuple(sorted(rows, key=_execution))

    def rows(self, process: Process, step: int) -> tuple[TensorRow, ...]:
        """All tensors of one step of one process in execution order; those of unknown order come last."""
        key = process, step
        if key not in self._rows:
            self._rows[key] = self._load_step(process, step)
            self._row_count += len(self._rows[key])
            while len(self._rows) > _KEPT_STEPS and self._row_count > _KEPT_ROWS:
                self._row_count -= len(self._rows.pop(next(iter(self._rows))))
        return self._rows[key]

    def any_rows(self, step: int) -> tuple[TensorRow, ...]:
        """The same of the first process that recorded the step; empty where none did."""
        return next((rows for p in self.processes if (rows := self.rows(p, step))), ())

    @cached_property
    def _places(self) -> Mapping[str, frozenset[tuple[str, ...]]]:
        columns = self.survey.totals.select(["kind", "root", "module", "name"]).to_pydict()
        found: dict[str, set[tuple[str, ...]]] = {}
        for kind, *place in zip(*columns.values(), strict=True):
            found.setdefault(kind, set()).add(tuple(place))
        return {kind: frozenset(places) for kind, places in found.items()}

    def places(self, kind: str) -> frozenset[tuple[str, ...]]:
        """Root, module and name of every tensor of this kind."""
        return self._places.get(kind, frozenset())

    def tensor_count(self, kinds: Sequence[str]) -> tuple[int, int]:
        """How many distinct tensors of these kinds there are, and on how many steps: what a rule looked at."""
        steps = [self.survey.steps_of[k] for k in kinds if k in self.survey.steps_of]
        return sum(len(self.places(k)) for k in kinds), len(np.unique(np.concatenate(steps))) if steps else 0

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

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """What the reader found wrong with the files; a log without its end is told by :attr:`complete`."""
        return tuple(str(p) for rank in self._run.ranks for p in rank.problems)

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

    @cached_property
    def missing(self) -> str | None:
        """Why a rule that found nothing must not say "passed"; None when the log is whole."""
        if self.dropped:
            return f"{sum(self.dropped.values()):,} rows were dropped ({', '.join(sorted(self.dropped))})"
        if self.recorder_errors:
            return f"the recorder failed: {self.recorder_errors[0]}"
        if self.cut_short is not None:
            return f"recording ended before the training did: {self.cut_short}"
        lost = [p for p in self.problems if p.endswith("is listed and missing")]
        if lost:
            return f"the log is damaged: {lost[0]}"
        return None

    @cached_property
    def partial_modules(self) -> bool:
        """Whether ``--include``/``--exclude`` left modules out, so that a producer may be invisible."""
        options = self._run.info.get("options") or self._run.info.get("recorder") or {}
        return bool(isinstance(options, Mapping) and (options.get("include") or options.get("exclude")))


def _schema(table: str, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([ATTEMPT if c == ATTEMPT.name else TABLES[table].field(c) for c in columns])


def _decoded(data: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(data) if isinstance(data, str) else data
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _execution(row: TensorRow) -> tuple[bool, int]:
    return (row.order is None, row.order or 0)
