"""Reads a run directory. The log is taken as hostile: any damage raises an error of :mod:`precdoctor.errors`.

>>> run = open_run("precdoctor-runs/train-20250101T120000Z-4711")
>>> run.tensors(columns=["step", "module", "amax"], filters=[("kind", "==", "output")])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import CorruptRunError
from precdoctor.runlog import documents
from precdoctor.runlog.caps import MAX_DIRECTORIES, MAX_PARTS, MAX_ROWS, Budget, hold
from precdoctor.runlog.costs import TENSOR_COST, document_cost, rows_cost, shared_model_cost
from precdoctor.runlog.files import ATTACH_FILE, END_FILE, RANK_FILE
from precdoctor.runlog.filters import Filters, Query, query
from precdoctor.runlog.layout import (
    MAX_JSON_BYTES,
    RankDirectory,
    rank_directories,
    read_json_if_there,
    read_regular,
    read_run_info,
    refuse_newer,
)
from precdoctor.runlog.lock import is_locked
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.parts import joined
from precdoctor.runlog.pieces import Piece, pieces_of, rank_rows
from precdoctor.runlog.remote import as_url, fetch, local_path, without_credentials
from precdoctor.runlog.shell import quoted_path
from precdoctor.runlog.survey import json_lines, readable, survey

if TYPE_CHECKING:
    import pandas as pd


#: Reasons in end.json that mean: recording stopped, training continued.
_CUT_SHORT = ("disk_budget", "disk", "error")
#: Columns that together identify a tensor.
_NAMES = ("root", "module", "kind", "name")


@dataclass(frozen=True)
class RankLog:
    """One process of the run.

    Attributes:
        end: content of end.json; None if the process did not close its log.
        problems: one sentence for each problem found without reading rows; `log verify` checks every byte.
        read_facts: reads rank.json of a rank directory.
    """

    rank: int
    attempt: int
    directory: Path
    end: dict[str, Any] | None
    problems: list[str]
    read_facts: Callable[[Path], dict[str, Any]] = field(repr=False)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Content of rank.json; empty if the process died before writing it.

        Raises:
            RunUnreadableError: rank.json is damaged or cannot be read.
        """
        return self.read_facts(self.directory)

    @property
    def complete(self) -> bool:
        """Whether the process closed its log; if not, the last second of rows may be missing."""
        return self.end is not None

    @property
    def cut_short(self) -> str | None:
        """Why recording ended before the training did (full disk, ``--max-disk``, an error); None if it did not."""
        end = self.end or {}
        return str(end.get("message") or end["reason"]) if end.get("reason") in _CUT_SHORT else None

    @property
    def stopped(self) -> str | None:
        """Why precdoctor itself ended the run (``--on-nonfinite stop``, ``--halt-on``); None if it did not."""
        end = self.end or {}
        return str(end.get("message") or end["reason"]) if end.get("reason") == "stopped" else None


class _Processes:
    """The rank directories of a run, indexed by rank and attempt."""

    def __init__(self, every: list[RankDirectory]) -> None:
        self.every = every
        self._by_name: dict[tuple[int, int | None], list[RankDirectory]] = {}
        for directory in every:
            for attempt in (None, directory.attempt):
                self._by_name.setdefault((directory.rank, attempt), []).append(directory)

    def of(self, rank: int, attempt: int | None) -> list[RankDirectory]:
        """The directories of ``rank``; of all its attempts if ``attempt`` is None."""
        return self._by_name.get((rank, attempt), [])


class Run:
    """A run directory, open for reading; made by :func:`open_run`. Each query reads the files anew."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        #: The run's name in reports: its path, or the URL that it was copied from.
        self.origin = str(path)
        #: Content of run.json: the command, host facts, recorder options, ``schema_version``.
        self.info = info
        #: Progress callback: ``(activity, items done, items in all)``.
        self.progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None
        #: Engine that reads the pieces of a table: None (processes of this machine if that is faster), ``local:N``,
        #: ``dask`` or ``dask:ADDRESS``.
        self.engine: str | None = None
        #: Checked parts, listings and manifests, so that later queries do not check them again.
        self.cache = PartCache()
        #: Counts the memory of everything that stays loaded for the run: documents, steps, events, names.
        self.budget = Budget(path)
        self._tensors: set[int] = set()
        self._models: dict[str, Any] = {}
        self._facts_cost = 0
        self._row_counts: dict[str, int] | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def is_copy(self) -> bool:
        """Whether the run was copied from a store into a directory of this machine."""
        return self.origin != str(self.path)

    @property
    def is_being_written(self) -> bool:
        """Whether its command, or a process that records, is still running on this machine."""
        return any(map(is_locked, (self.path.resolve(), *(r.directory for r in self.ranks if r.end is None))))

    @cached_property
    def ranks(self) -> list[RankLog]:
        """The processes that recorded, by rank and attempt.

        Raises:
            RunUnreadableError: an end.json or parts.jsonl is damaged or cannot be read; in a run of one process also
                its rank.json.
        """
        with advice(self.path):
            self.budget.keep("run.json", document_cost(self.info))
            logs = [_rank_log(directory, self.cache, self._facts_of) for directory in self._processes().every]
            self.budget.keep("end.json", sum(document_cost(log.end or {}) for log in logs))
            if len(logs) == 1:  # with several processes, a bad rank.json must not hide the logs of the others
                _ = logs[0].facts
            return logs

    def _facts_of(self, directory: Path) -> dict[str, Any]:
        with advice(self.path), readable(directory.name):
            facts = read_json_if_there(directory / RANK_FILE, documents.RANK) or {}
            refuse_newer(facts.get("schema_version") or 0, directory)  # the command's precdoctor may be another one
        self._facts_cost += shared_model_cost(facts, self._models)
        self.budget.keep("rank.json", self._facts_cost)
        return facts

    def tensors(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """One row per tensor and step, by rank, attempt and time of writing.

        Names are categoricals, nullable integers and booleans have pandas' nullable types, lists are NumPy arrays (or
        None). A null float becomes NaN, as pandas has it; :meth:`batches` keeps the two apart.

        Args:
            columns: names, in this order; None for all. ``attempt`` is also a column.
            filters: ``[("step", ">=", 3), ("kind", "in", ["output", "loss"])]`` or a pyarrow expression.

        Raises:
            UsageError: an unknown column or operator, or a value that cannot be compared with its column.
            RunUnreadableError: a part is damaged or cannot be read.
        """
        return self._frame("tensors", columns, filters)

    def steps(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """One row per (step, optimizer); as :meth:`tensors`."""
        return self._frame("steps", columns, filters)

    def events(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """Incidents, op traces, warnings, drops; as :meth:`tensors`. ``data`` is JSON text."""
        return self._frame("events", columns, filters)

    def ops(self, columns: Sequence[str] | None = None, filters: Filters | None = None) -> pd.DataFrame:
        """One row per tensor that an op read or made, on the steps of ``record --ops``; as :meth:`tensors`."""
        return self._frame("ops", columns, filters)

    def dataset(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> pa.RecordBatchReader:
        """A table as an Arrow stream, which can be read once. pyarrow, Polars and DuckDB need not load all of it.

        Raises:
            UsageError, RunUnreadableError: as :meth:`tensors`; damage is found while reading.
        """
        asked = query(name, columns, filters)
        return pa.RecordBatchReader.from_batches(asked.schema, self._read(asked))

    def batches(
        self, name: str, columns: Sequence[str] | None = None, filters: Filters | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table, some thousands at a time, in flat memory; empty batches are left out.

        Raises:
            UsageError, RunUnreadableError: as :meth:`tensors`; damage is found while reading.
        """
        return self._read(query(name, columns, filters))

    def pieces(self, table: str) -> list[Piece]:
        """The pieces of a table, by rank, attempt and time of writing; :func:`~.pieces.piece_rows` reads one.

        Raises:
            RunUnreadableError: a directory is damaged or cannot be read.
        """
        with advice(self.path):
            return [p for directory in self._processes().every for p in pieces_of(directory, table, self.cache)]

    def seals(self) -> dict[str, str] | None:
        """The checksum of every part by its name; None if any part is open, missing or not listed."""
        checksums: dict[str, str] = {}
        for directory in self._processes().every:
            with readable(directory.path.name):
                files = survey(directory.path, self.cache)
            if files.missing or files.unlisted or not all(file.sealed for file in files.files):
                return None
            checksums |= {f"{directory.path.name}/{name}": part.blake2b for name, part in files.listed.items()}
        return checksums

    def attach_lines(self) -> list[dict[str, Any]]:
        """The lines of attach.jsonl, written by the processes that were offered recording; empty if there is no file.

        Raises:
            RunUnreadableError: attach.jsonl is damaged or cannot be read.
        """
        path = self.path / ATTACH_FILE
        with advice(self.path), readable(ATTACH_FILE):
            try:
                content = read_regular(path, MAX_JSON_BYTES)
            except FileNotFoundError:
                return []
            return json_lines(content, Path(ATTACH_FILE))

    def _processes(self) -> _Processes:
        with readable(str(self.path)):
            processes = self.cache.listing(self.path, lambda: _Processes(rank_directories(self.path)))
        if self._row_counts is None:
            self._row_counts = self._rows_within_caps(processes)
        return processes

    def listed_rows(self, table: str) -> int:
        """Number of rows of a table in the sealed parts of all processes, as parts.jsonl states it.

        Raises:
            RunUnreadableError: a directory is damaged or cannot be read.
        """
        with advice(self.path):
            self._processes()
        return (self._row_counts or {}).get(table, 0)

    def _rows_within_caps(self, found: _Processes) -> dict[str, int]:
        """Number of listed rows by table.

        Raises:
            RunTooLargeError: the run is above the caps on directories, parts or rows. No row has been read yet.
        """
        hold(len(found.every), MAX_DIRECTORIES, f"{self.path} holds {{}} rank directories")
        parts, rows = 0, dict.fromkeys(MAX_ROWS, 0)
        for number, rank in enumerate(found.every, 1):
            self.progress("reading directories", number, len(found.every))
            with readable(rank.path.name):
                files = survey(rank.path, self.cache)
            parts += len(files.files)
            hold(parts, MAX_PARTS, f"{self.path} holds {{}} parts")
            for name, part in files.listed.items():
                rows[name.partition("-")[0]] += part.rows
        for table, count in rows.items():
            hold(count, MAX_ROWS[table], f"{self.path} holds {{}} rows of {table}")
        return rows

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
        # types_mapper sees only the type; columns that cannot be null get NumPy's types back.
        plain = {f.name: f.type.to_pandas_dtype() for f in asked.schema if f.type in nullable and not f.nullable}
        return frame.astype(plain)

    def _read(self, asked: Query) -> Iterator[pa.RecordBatch]:
        with advice(self.path):
            processes = self._processes()
            wanted = processes.every if asked.rank is None else processes.of(asked.rank, asked.attempt)
            rows = (batch for rank in wanted for batch in rank_rows(rank, asked, self.cache))
            cost = 0
            for batch in map(asked.select, joined(rows)):
                if batch.num_rows:
                    cost += self._cost_of(batch, asked.table)
                    self.budget.keep(asked.table, cost)
                    yield batch

    def _cost_of(self, batch: pa.RecordBatch, table: str) -> int:
        """Bytes that the rows of a batch take in memory; 0 for ``tensors``, whose new names go to the budget here."""
        if table != "tensors":
            return rows_cost(table, batch)
        if not set(_NAMES).issubset(batch.schema.names):
            return 0
        keys = np.zeros(batch.num_rows, np.int64)
        for name in _NAMES:  # str hashes are salted, so a hostile log cannot choose names that collide
            column = batch.column(name)
            hashes = np.fromiter(map(hash, column.dictionary.to_pylist()), np.int64, len(column.dictionary))
            keys = keys * 1_000_003 + hashes[column.indices.to_numpy(zero_copy_only=False)]
        self._tensors.update(pc.unique(pa.array(keys)).to_pylist())
        self.budget.keep("names", TENSOR_COST * len(self._tensors))
        return 0


def open_run(path: str | os.PathLike[str] | Run) -> Run:
    """Open a run directory; only its run.json is read. A :class:`Run` is returned as it is.

    The run at a URL (``s3://``, ``gs://``, any of fsspec's) is copied to a temporary directory; see
    :func:`.remote.fetch` for its errors.

    Raises:
        RunNotFoundError: there is no run directory at ``path``.
        NewerSchemaError: it was written by a newer precdoctor.
        CorruptRunError: run.json is damaged.
        RunUnreadableError: the operating system refuses to read it.
    """
    if isinstance(path, Run):
        return path
    url = as_url(path)
    local = Path(path) if url is None else local_path(url)
    if local is not None:
        return Run(local, read_run_info(local))
    assert url is not None
    run = fetch(url)
    opened = Run(run, read_run_info(run))
    opened.origin = without_credentials(url)
    return opened


@contextmanager
def advice(run: Path) -> Iterator[None]:
    """Add to every CorruptRunError, once, the command that shows which parts are intact."""
    hint = f"; see what is left with: precdoctor log verify {quoted_path(run)}"
    try:
        yield
    except CorruptRunError as error:
        raise CorruptRunError(str(error).removesuffix(hint) + hint) from error


def _rank_log(rank: RankDirectory, cache: PartCache, read_facts: Callable[[Path], dict[str, Any]]) -> RankLog:
    with readable(rank.path.name):
        content = survey(rank.path, cache)
        end = read_json_if_there(rank.path / END_FILE, documents.END)
    problems = []
    if not os.path.lexists(rank.path / RANK_FILE):
        problems.append(f"{RANK_FILE} is missing: the process ended before it had seen the model")
    if end is None:
        problems.append(f"{END_FILE} is missing: the process was killed, is still running, or had no disk space left")
    else:
        problems += [f"{part.path.name} was left open" for part in content.files if not part.sealed]
    problems += [f"{name} is listed and missing" for name in content.missing]
    problems += [f"{name} is not listed" for name in content.unlisted]
    return RankLog(rank.rank, rank.attempt, rank.path, end, problems, read_facts)
