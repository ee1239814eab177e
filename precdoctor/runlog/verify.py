"""Checks every byte of a run directory, for ``log verify``. Damage is reported in the result, not raised."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import RunUnreadableError
from precdoctor.runlog.caps import MAX_DIRECTORIES, hold
from precdoctor.runlog.documents import END, RANK, Shape
from precdoctor.runlog.files import END_FILE, RANK_FILE, SEALED_PART
from precdoctor.runlog.filters import query
from precdoctor.runlog.layout import RankDirectory, rank_directories, read_json_if_there, read_regular, read_run_info
from precdoctor.runlog.lock import is_locked
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.parts import open_rows, sealed_rows
from precdoctor.runlog.schema import TABLES
from precdoctor.runlog.sealing import Part
from precdoctor.runlog.stream import MAX_STREAM_BYTES, StreamScan, Witness, read_witness, scan
from precdoctor.runlog.survey import PartFile, Survey, readable, survey


@dataclass(frozen=True)
class PartReport:
    """The state of one sealed part.

    ``status``: ok, damaged, missing (listed in parts.jsonl, no file), or unlisted (a file, not in parts.jsonl).
    """

    name: str
    status: str
    rows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class StreamReport:
    """The state of one open stream: whole batches and their rows; ``torn``: an incomplete write follows them."""

    name: str
    batches: int = 0
    rows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    torn: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class RankReport:
    """The state of the log of one process.

    Attributes:
        name: name of the rank directory.
        live: whether a living process still writes here.
        clean_close: whether end.json exists, so that no rows were lost at the end.
        gaps: parts that must have existed, because later ones do, but have no file and are not listed.
        dropped: number of rows that the recorder dropped, by reason, according to its own events.
        problems: one sentence for each file that cannot be trusted; empty for a sound directory.
    """

    name: str
    rank: int
    attempt: int
    live: bool
    clean_close: bool
    parts: list[PartReport] = field(default_factory=list)
    streams: list[StreamReport] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Readable rows, all tables together."""
        return sum(part.rows for part in self.parts) + sum(stream.rows for stream in self.streams)

    @property
    def step_range(self) -> tuple[int, int] | None:
        """First and last step of the readable rows; None when no row states one."""
        readable_parts: list[PartReport | StreamReport] = [*self.parts, *self.streams]
        first = [part.first_step for part in readable_parts if part.first_step is not None]
        last = [part.last_step for part in readable_parts if part.last_step is not None]
        return (min(first), max(last)) if first and last else None

    @property
    def ok(self) -> bool:
        """Whether all files can be trusted. The end of a killed process is no damage: see ``clean_close``."""
        return not self.problems


@dataclass(frozen=True)
class Verification:
    """The result of ``log verify``; ``ok`` if nothing is damaged or missing."""

    path: Path
    ranks: list[RankReport]

    @property
    def ok(self) -> bool:
        """Whether every rank is ok."""
        return all(rank.ok for rank in self.ranks)

    @property
    def problems(self) -> list[str]:
        """The problems of all ranks."""
        return [problem for rank in self.ranks for problem in rank.problems]


def verify(
    path: str | os.PathLike[str], progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None
) -> Verification:
    """Read every row of every part, and compare it with parts.jsonl; ``progress`` as :attr:`.reader.Run.progress`.

    Raises:
        RunNotFoundError: there is no run directory at ``path``.
        NewerSchemaError: it was written by a newer precdoctor.
        CorruptRunError: run.json itself is damaged.
        RunTooLargeError: there are more rank directories than ``MAX_DIRECTORIES``.
        RunUnreadableError: the directory cannot be listed.
    """
    run = Path(path)
    read_run_info(run)  # raises if this is no run that can be read
    with readable(str(run)):
        directories = rank_directories(run)
        hold(len(directories), MAX_DIRECTORIES, f"{run} holds {{}} rank directories")
    ranks = []
    for number, directory in enumerate(directories, 1):
        ranks.append(_rank_report(directory))
        progress("directories", number, len(directories))
    return Verification(run, ranks)


def _rank_report(rank: RankDirectory) -> RankReport:
    problems: list[str] = []
    live = False
    content = Survey([], {})
    try:
        with readable(rank.path.name):
            live = is_locked(rank.path)
            content = survey(rank.path)
    except RunUnreadableError as error:
        problems.append(str(error))
    dropped: Counter[str] = Counter()
    parts = [
        _part_report(file, content.listed.get(file.path.name), rank, dropped) for file in content.files if file.sealed
    ]
    parts += [
        PartReport(name, "missing", problem=f"{rank.path.name}/{name} is listed in parts.jsonl and missing")
        for name in content.missing
    ]
    streams = [_stream_report(file, rank, dropped) for file in content.files if not file.sealed]
    gaps = _gaps(content)
    problems += [] if live else _changed_streams(rank, content)
    problems += [part.problem for part in parts if part.problem]
    problems += [stream.problem for stream in streams if stream.problem]
    problems += [f"{rank.path.name}/{name} was written and is missing" for name in gaps]
    closed = _document_exists(rank.path / END_FILE, END, problems)
    _document_exists(rank.path / RANK_FILE, RANK, problems)
    return RankReport(
        rank.path.name, rank.rank, rank.attempt, live, closed, parts, streams, gaps, dict(dropped), problems
    )


def _document_exists(path: Path, shape: Shape, problems: list[str]) -> bool:
    try:
        with readable(f"{path.parent.name}/{path.name}"):
            return read_json_if_there(path, shape) is not None
    except RunUnreadableError as error:
        problems.append(str(error))
        return True


def _part_report(file: PartFile, listed: Part | None, rank: RankDirectory, dropped: Counter[str]) -> PartReport:
    name = file.path.name
    if listed is None:
        return PartReport(name, "unlisted", problem=f"{file.name} is not listed in parts.jsonl: nothing vouches for it")
    try:
        rows, first, last = _count(sealed_rows(file, listed, query(file.table), rank, PartCache()), file.table, dropped)
    except RunUnreadableError as error:
        return PartReport(name, "damaged", problem=str(error))
    if (listed.first_step, listed.last_step) != (first, last):
        problem = f"{file.name} holds steps {first} to {last}, and parts.jsonl says otherwise"
        return PartReport(name, "damaged", rows, first, last, problem)
    return PartReport(name, "ok", rows, first, last)


def _stream_report(file: PartFile, rank: RankDirectory, dropped: Counter[str]) -> StreamReport:
    try:
        with readable(file.name):
            scanned = scan(read_regular(file.path, MAX_STREAM_BYTES), file.name)
            rows, first, last = _count(open_rows(file, query(file.table), rank), file.table, dropped)
    except RunUnreadableError as error:
        return StreamReport(file.path.name, problem=str(error))
    return StreamReport(file.path.name, scanned.batches, rows, first, last, scanned.torn)


def _changed_streams(rank: RankDirectory, found: Survey) -> list[str]:
    """Problems of open streams that were cut, removed or exchanged, found from the witness in each stream's last batch.

    The witness of a damaged stream is not used; the damage is reported elsewhere.
    """
    scans: dict[str, StreamScan] = {}
    witnesses: list[Witness] = []
    problems = []
    for file in found.files:
        if file.sealed:
            continue
        name = file.path.name.removesuffix(".arrows.open")
        with contextlib.suppress(RunUnreadableError), readable(file.name):
            content = read_regular(file.path, MAX_STREAM_BYTES)
            scans[name] = scan(content, file.name)
            witness = read_witness(content, scans[name]) if scans[name].batches else None
            if witness is not None:
                witnesses.append(witness)
                if witness.name != name:
                    problems.append(f"{file.name} is a copy of {witness.name}.arrows.open")
    sealed = {name.removesuffix(".parquet") for name in found.listed}
    present = {file.path.name.removesuffix(".arrows.open") for file in found.files}
    for name, (size, digest) in sorted({item for w in witnesses for item in w.beside.items()}):
        where = f"{rank.path.name}/{name}.arrows.open"
        if name in sealed:
            continue
        if name not in present:
            problems.append(f"{where} was written and is missing")
        elif name in scans and scans[name].ends.get(size) != digest:
            problems.append(f"{where} was cut or exchanged: its process had written {size} bytes of it")
    return list(dict.fromkeys(problems))


def _count(batches: Iterator[pa.RecordBatch], table: str, dropped: Counter[str]) -> tuple[int, int | None, int | None]:
    """``(rows, first step, last step)`` of a part; adds the rows of its drop events to ``dropped``, by reason."""
    rows, firsts, lasts = 0, [], []
    for batch in batches:
        rows += batch.num_rows
        steps = pc.min_max(batch.column("step")).as_py()
        if steps["min"] is not None:
            firsts.append(steps["min"])
            lasts.append(steps["max"])
        if table == "events":
            drops = pc.equal(batch.column("event"), "drop")
            for data in batch.column("data").filter(drops).to_pylist():
                reason, lost = _parse_drop(data)
                dropped[reason] += lost
    return rows, min(firsts, default=None), max(lasts, default=None)


def _parse_drop(data: str | None) -> tuple[str, int]:
    """``(reason, rows)`` of a drop event; an unreadable event counts as one row, reason "unknown"."""
    try:
        content = json.loads(data or "")
        return str(content["reason"]), int(content["rows"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "unknown", 1


def _gaps(found: Survey) -> list[str]:
    """Names of parts whose number is below the largest of their table, but that no file has and no line lists."""
    gaps = []
    for table in TABLES:
        numbers = {file.number for file in found.files if file.table == table}
        numbers |= {
            int(match[2]) for name in found.listed if (match := SEALED_PART.fullmatch(name)) and match[1] == table
        }
        missing = sorted(set(range(1, max(numbers, default=0))) - numbers)
        gaps += [f"{table}-{number:06d}.parquet" for number in missing]
    return gaps
