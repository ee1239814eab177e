"""Reads a run directory. The log is taken as hostile; whatever is wrong with it becomes one of our errors.

>>> run = open_run("precdoctor-runs/train-20250101T120000Z-4711")
>>> run.tensors(columns=["step", "module", "amax"], filters=[("kind", "==", "output")])
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import CorruptRunError
from precdoctor.runlog import documents
from precdoctor.runlog.caps import JSON_COSTS, MAX_DIRECTORIES, MAX_PARTS, MAX_ROWS, Budget, hold, json_cost
from precdoctor.runlog.files import ATTACH_FILE, END_FILE, RANK_FILE
from precdoctor.runlog.filters import Filters, Query, query
from precdoctor.runlog.kept import Kept
from precdoctor.runlog.layout import (
    MAX_JSON_BYTES,
    RankDirectory,
    rank_directories,
    read_json_if_there,
    read_regular,
    read_run_info,
)
from precdoctor.runlog.parts import joined, open_rows, sealed_rows, with_attempt
from precdoctor.runlog.shell import quoted_path
from precdoctor.runlog.survey import json_lines, read_manifest, readable, survey

if TYPE_CHECKING:
    import os

    import pandas as pd


#: Reasons in end.json for which the training went on without the recorder.
_CUT_SHORT = ("disk_budget", "disk", "error")
#: Bytes that a row takes, its text and lists left out, with what the rules make of it; measured on logs of a million.
_ROW_COSTS = {"steps": 2400, "events": 2100}
#: The same for a learning rate of a parameter group, and for a tensor, however many rows it has.
_RATE_COST, _TENSOR_COST = 64, 4500
#: What tells one tensor from another.
_NAMES = ("root", "module", "kind", "name")


@dataclass(frozen=True)
class RankLog:
    """One process of the run.

    Attributes:
        facts: rank.json; empty when the process died before writing it.
        end: end.json; None when the process did not close its log.
        problems: one sentence each, for what is known without reading rows; `verify` looks at every byte.
    """

    rank: int
    attempt: int
    directory: Path
    facts: dict[str, Any]
    end: dict[str, Any] | None
    problems: list[str]

    @property
    def complete(self) -> bool:
        """Whether the process closed its log; if not, the last second of rows may be missing."""
        return self.end is not None

    @property
    def cut_short(self) -> str | None:
        """Why recording ended before the training did (a full disk, ``--max-disk``); None when it did not."""
        end = self.end or {}
        return str(end.get("message") or end["reason"]) if end.get("reason") in _CUT_SHORT else None

    @property
    def stopped(self) -> str | None:
        """Why precdoctor itself ended the run (``--on-nonfinite stop``, ``--halt-on``); None when it did not."""
        end = self.end or {}
        return str(end.get("message") or end["reason"]) if end.get("reason") == "stopped" else None


class _Processes:
    """The rank directories of a run, and those of one rank or attempt without going through all of them."""

    def __init__(self, every: list[RankDirectory]) -> None:
        self.every = every
        self._by_name: dict[tuple[int, int | None], list[RankDirectory]] = {}
        for directory in every:
            for attempt in (None, directory.attempt):
                self._by_name.setdefault((directory.rank, attempt), []).append(directory)

    def of(self, rank: int, attempt: int | None) -> list[RankDirectory]:
        """Those of a rank; with ``attempt`` only those of this attempt."""
        return self._by_name.get((rank, attempt), [])


class Run:
    """A run directory, open for reading; made by :func:`open_run`. Each call reads what is there at that moment."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        #: run.json: the command, host facts, recorder options, ``schema_version``.
        self.info = info
        #: Called with what is being done, how much of it is done, and how much there is.
        self.progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None
        #: Counts what is kept of the run as a whole.
        self.budget = Budget(path)
        self._tensors: set[int] = set()
        self._kept = Kept()
        self._sized = False

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def ranks(self) -> list[RankLog]:
        """The processes that recorded, by rank and attempt.

        Raises:
            RunUnreadableError: a rank.json, end.json or parts.jsonl is damaged or cannot be read.
        """
        with _advice(self.path):
            self.budget.keep("run.json", _cost(self.info))
            models: dict[str, Any] = {}
            logs, cost = [], 0
            for directory in self._processes().every:
                log = _rank_log(directory, self._kept)
                cost += _share_model(log.facts, models) + _cost(log.end or {})
                self.budget.keep("rank.json", cost)
                logs.append(log)
            return logs

    def tensors(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """One row per tensor and step, by rank, attempt and time of writing.

        Names are categoricals, nullable integers and booleans pandas' nullable types, lists NumPy arrays (or None). A
        null float reads as NaN, as pandas does; :meth:`batches` tells the two apart.

        Args:
            columns: names, in this order; None for all. ``attempt`` is one of them.
            filters: ``[("step", ">=", 3), ("kind", "in", ["output", "loss"])]`` or a pyarrow expression.

        Raises:
            UsageError: an unknown column or operator, or a value that does not compare with its column.
            RunUnreadableError: a part is damaged or cannot be read.
        """
        return self._frame("tensors", columns, filters)

    def steps(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """One row per (step, optimizer); as :meth:`tensors`."""
        return self._frame("steps", columns, filters)

    def events(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """Incidents, op traces, warnings, drops; as :meth:`tensors`. ``data`` is JSON text."""
        return self._frame("events", columns, filters)

    def dataset(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> pa.RecordBatchReader:
        """A table as an Arrow stream, which pyarrow, Polars and DuckDB read without holding all of it; reads once.

        Raises:
            UsageError, RunUnreadableError: as :meth:`tensors`; damage is met while reading.
        """
        asked = query(name, columns, filters)
        return pa.RecordBatchReader.from_batches(asked.schema, self._read(asked))

    def batches(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table, some thousands at a time, in flat memory; empty batches are left out.

        Raises:
            UsageError, RunUnreadableError: as :meth:`tensors`; damage is met while reading.
        """
        return self._read(query(name, columns, filters))

    def attach_lines(self) -> list[dict[str, Any]]:
        """attach.jsonl: one object per process that was offered recording; empty when there is none.

        Raises:
            RunUnreadableError: it is damaged or cannot be read.
        """
        path = self.path / ATTACH_FILE
        with _advice(self.path), readable(ATTACH_FILE):
            try:
                content = read_regular(path, MAX_JSON_BYTES)
            except FileNotFoundError:
                return []
            return json_lines(content, Path(ATTACH_FILE))

    def _processes(self) -> _Processes:
        with readable(str(self.path)):
            found = self._kept.listing(self.path, lambda: _Processes(rank_directories(self.path)))
        if not self._sized:
            self._hold(found)
            self._sized = True
        return found

    def _hold(self, found: _Processes) -> None:
        """Refuse a run above the caps before a row of it is read."""
        hold(len(found.every), MAX_DIRECTORIES, f"{self.path} holds {{}} rank directories")
        parts, rows = 0, dict.fromkeys(MAX_ROWS, 0)
        for number, rank in enumerate(found.every, 1):
            self.progress("reading directories", number, len(found.every))
            with readable(rank.path.name):
                files = survey(rank.path, self._kept)
            parts += len(files.files)
            hold(parts, MAX_PARTS, f"{self.path} holds {{}} parts")
            for name, part in files.listed.items():
                rows[name.partition("-")[0]] += part.rows
        for table, count in rows.items():
            hold(count, MAX_ROWS[table], f"{self.path} holds {{}} rows of {table}")

    def _frame(self, table: str, columns: Sequence[str] | None, filters: Filters | None) -> pd.DataFrame:
        import pandas as pd

        asked = query(table, columns, filters)
        whole = pa.Table.from_batches(self._read(asked), asked.schema).unify_dictionaries()
        nullable = {
            pa.int32(): pd.Int32Dtype(),
            pa.int64(): pd.Int64Dtype(),
            pa.uint64(): pd.UInt64Dtype(),
            pa.bool_(): pd.BooleanDtype(),
        }
        frame: pd.DataFrame = whole.to_pandas(types_mapper=nullable.get)
        # pandas maps by type alone; columns that cannot be null need no mask.
        plain = {f.name: f.type.to_pandas_dtype() for f in asked.schema if f.type in nullable and not f.nullable}
        typed: pd.DataFrame = frame.astype(plain)
        return typed

    def _read(self, asked: Query) -> Iterator[pa.RecordBatch]:
        with _advice(self.path):
            processes = self._processes()
            wanted = processes.every if asked.rank is None else processes.of(asked.rank, asked.attempt)
            rows = (batch for rank in wanted for batch in _rank_rows(rank, asked, self._kept))
            cost = 0
            for batch in map(asked.select, joined(rows)):
                if batch.num_rows:
                    cost += self._cost_of(batch, asked.table)
                    self.budget.keep(asked.table, cost)
                    yield batch

    def _cost_of(self, batch: pa.RecordBatch, table: str) -> int:
        """Bytes that are kept of rows; of ``tensors``, of those tensors that were not met before in the run."""
        if table != "tensors":
            return _rows_cost(table, batch)
        if not set(_NAMES).issubset(batch.schema.names):
            return 0
        keys = np.zeros(batch.num_rows, np.int64)
        for name in _NAMES:  # Python's hashes of texts are salted: nobody can write names that fall together
            column = batch.column(name)
            hashes = np.fromiter(map(hash, column.dictionary.to_pylist()), np.int64, len(column.dictionary))
            keys = keys * 1_000_003 + hashes[column.indices.to_numpy(zero_copy_only=False)]
        self._tensors.update(pc.unique(pa.array(keys)).to_pylist())
        self.budget.keep("names", _TENSOR_COST * len(self._tensors))
        return 0


def open_run(path: str | os.PathLike[str] | Run) -> Run:
    """Open a run directory; only its run.json is read. A run that is open already is given back as it is.

    Raises:
        RunNotFoundError: there is no run directory at ``path``.
        NewerSchemaError: it was written by a newer precdoctor.
        CorruptRunError: run.json is damaged.
        RunUnreadableError: the operating system refuses to read it.
    """
    if isinstance(path, Run):
        return path
    run = Path(path)
    return Run(run, read_run_info(run))


@contextmanager
def _advice(run: Path) -> Iterator[None]:
    """What says that the log is damaged says what to type next, too."""
    try:
        yield
    except CorruptRunError as error:
        raise CorruptRunError(f"{error}; see what is left with: precdoctor log verify {quoted_path(run)}") from error


def _rank_rows(rank: RankDirectory, asked: Query, kept: Kept) -> Iterator[pa.RecordBatch]:
    name = rank.path.name
    with readable(name):
        found = survey(rank.path, kept)
    for missing in found.missing:
        if missing.startswith(f"{asked.table}-"):
            raise CorruptRunError(f"{name}/{missing} is missing")
    for part in found.files:
        if part.table != asked.table:
            continue
        listed = found.listed
        if not part.sealed:
            try:
                for batch in open_rows(part, asked, rank):
                    yield with_attempt(batch, rank)
                continue
            except FileNotFoundError:  # sealed since
                with readable(name):
                    listed = read_manifest(rank.path)
        sealed = part.as_sealed()
        for batch in sealed_rows(sealed, listed.get(sealed.path.name), asked, rank, kept):
            yield with_attempt(batch, rank)


def _share_model(facts: dict[str, Any], models: dict[str, Any]) -> int:
    """Bytes that facts take in memory. The tree of modules is kept once for all ranks that have the same."""
    roots = facts.get("roots")
    if not roots:
        return _cost(facts)
    text = json.dumps(roots)
    key = hashlib.sha256(text.encode()).hexdigest()
    cost = 0 if key in models else json_cost(text.encode())
    facts["roots"] = models.setdefault(key, roots)
    return cost + _cost({name: value for name, value in facts.items() if name != "roots"})


def _cost(document: dict[str, Any]) -> int:
    return json_cost(json.dumps(document).encode())


def _rows_cost(table: str, batch: pa.RecordBatch) -> int:
    """Bytes that the rows of a batch of ``steps`` or ``events`` may take in memory; 0 for ``tensors``."""
    cost = _ROW_COSTS.get(table, 0) * batch.num_rows
    if not cost:
        return 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "lrs":
            cost += _RATE_COST * len(column.flatten())
        elif pa.types.is_string(column.type):
            cost += 2 * column.nbytes
        if name == "data":
            found = {sign: pc.sum(pc.count_substring(column, sign)).as_py() or 0 for sign in JSON_COSTS}
            cost += sum(found[sign] * JSON_COSTS[sign] for sign in found)
    return int(cost)


def _rank_log(rank: RankDirectory, kept: Kept) -> RankLog:
    with readable(rank.path.name):
        found = survey(rank.path, kept)
        facts = read_json_if_there(rank.path / RANK_FILE, documents.RANK)
        end = read_json_if_there(rank.path / END_FILE, documents.END)
    problems = []
    if facts is None:
        problems.append(f"{RANK_FILE} is missing: the process ended before it had seen the model")
    if end is None:
        problems.append(f"{END_FILE} is missing: the process was killed or is still running")
    else:
        problems += [f"{part.path.name} was left open" for part in found.files if not part.sealed]
    problems += [f"{name} is listed and missing" for name in found.missing]
    problems += [f"{name} is not listed" for name in found.unlisted]
    return RankLog(rank.rank, rank.attempt, rank.path, facts or {}, end, problems)
