"""Reads one part of a log that nobody vouches for: checked before, while and after it is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precdoctor.errors import CorruptRunError, RunUnreadableError
from precdoctor.runlog.filters import ATTEMPT, Query
from precdoctor.runlog.layout import MAX_JSON_BYTES, RankDirectory, files_matching, parse_json, read_regular
from precdoctor.runlog.schema import OPEN_PART, PARTS_FILE, SEALED_PART, TABLES
from precdoctor.runlog.sealing import Part, digest_of
from precdoctor.runlog.stream import MAX_STREAM_BYTES, read_batches, scan, stored_type
from precdoctor.runlog.writer import MAX_STRING_BYTES

MAX_PART_BYTES: Final = 512 << 20
MAX_PART_ROWS: Final = 1 << 24
MAX_PARTS: Final = 1 << 20
MAX_COLUMNS: Final = 1024
#: Longest list in a row: a histogram has about 320 bins, a shape a handful of dimensions.
MAX_LIST: Final = 1 << 16
#: Rows decoded at a time; with block histograms a row takes about 2 kB in memory.
BATCH_ROWS: Final = 1 << 14
_THRIFT_LIMIT: Final = 16 << 20

_ARROW_ERRORS: Final = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError, KeyError)


@dataclass(frozen=True)
class PartFile:
    """A file that holds rows: a sealed part, or the stream of one that is not sealed yet."""

    path: Path
    table: str
    number: int
    sealed: bool

    @property
    def name(self) -> str:
        """As messages give it: ``rank-00000/tensors-000001.parquet``."""
        return f"{self.path.parent.name}/{self.path.name}"

    def as_sealed(self) -> PartFile:
        """The part that an open stream becomes."""
        name = f"{self.table}-{self.number:06d}.parquet"
        return PartFile(self.path.with_name(name), self.table, self.number, sealed=True)


@dataclass(frozen=True)
class Manifest:
    """What parts.jsonl lists; ``torn``: its last line was cut off in the middle of a write."""

    parts: dict[str, Part]
    torn: bool


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns what the operating system or Arrow says about a file into one of our errors."""
    try:
        yield
    except RunUnreadableError:
        raise
    except pa.ArrowException as error:
        raise damaged(name, error) from error
    except OSError as error:
        if error.errno is None:  # Arrow raises a bare OSError for a damaged file
            raise damaged(name, error) from error
        raise RunUnreadableError(f"cannot read {name}: {error.strerror or error}") from error
    except _ARROW_ERRORS as error:
        raise damaged(name, error) from error


def damaged(name: str, why: object) -> CorruptRunError:
    """The error for a part that cannot be trusted; ``why`` is cut to its first line."""
    line = (str(why).splitlines() or [type(why).__name__])[0].rstrip(".")
    return CorruptRunError(f"{name} is damaged ({line[:200]}); see what is left with: precdoctor log verify RUN")


def read_manifest(directory: Path) -> Manifest:
    """The lines of parts.jsonl; for a part that is listed twice the last line holds.

    Raises:
        CorruptRunError: a line is damaged.
        OSError: the file is there but cannot be read.
    """
    path = directory / PARTS_FILE
    where = Path(directory.name) / PARTS_FILE
    try:
        content = read_regular(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        return Manifest({}, torn=False)
    lines = content.split(b"\n")
    parts = {}
    for line in lines[:-1]:
        part = _part(parse_json(line, where))
        if part is None:
            raise CorruptRunError(f"{where} is damaged: {line[:80]!r} lists no part")
        parts[part.name] = part
    return Manifest(parts, torn=lines[-1] != b"")


def _part(line: dict[str, Any]) -> Part | None:
    values = [line.get(f.name) for f in fields(Part)]
    name, rows, first, last, digest = values
    numbers = all(n is None or (isinstance(n, int) and not isinstance(n, bool)) for n in (first, last))
    if not (isinstance(name, str) and SEALED_PART.fullmatch(name) and isinstance(digest, str) and numbers):
        return None
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
        return None
    return Part(name, rows, first, last, digest)


def part_files(directory: Path) -> list[PartFile]:
    """The files that hold the rows of a rank, by table and number; a stream whose part is sealed is left out.

    Raises:
        CorruptRunError: more of them than any rank has.
        OSError: the directory cannot be listed.
    """
    found: dict[tuple[str, int], PartFile] = {}
    for pattern, sealed in ((OPEN_PART, False), (SEALED_PART, True)):
        for match, path in files_matching(directory, pattern):
            found[match[1], int(match[2])] = PartFile(path, match[1], int(match[2]), sealed)
    if len(found) > MAX_PARTS:
        raise CorruptRunError(f"{directory.name} holds {len(found)} parts; no rank has that many")
    return [found[key] for key in sorted(found)]


def read_sealed(part: PartFile, listed: Part | None, query: Query, rank: RankDirectory) -> Iterator[pa.RecordBatch]:
    """The rows of a sealed part that ``query`` asks for.

    Raises:
        CorruptRunError: the part is not what was written, or nothing precdoctor would write.
        RunUnreadableError: the operating system refuses to read it.
    """
    with readable(part.name):
        content = read_regular(part.path, MAX_PART_BYTES)
        if listed is not None and digest_of(content) != listed.blake2b:
            raise damaged(part.name, "its checksum is not the one in parts.jsonl")
        with open_parquet(content) as file:
            check_footer(part.name, file.metadata, listed)
            columns = _columns_present(part.name, file.schema_arrow, query)
            groups = [n for n in range(file.metadata.num_row_groups) if _may_match(file.metadata, n, query)]
            expected = sum(file.metadata.row_group(n).num_rows for n in groups)
            if not groups:
                return
            seen = 0
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns):
                seen += batch.num_rows
                yield _conform(part.name, batch, query, rank)
            if seen != expected:
                raise damaged(part.name, f"it holds {seen} rows and claims {expected}")


def read_open(part: PartFile, query: Query, rank: RankDirectory) -> Iterator[pa.RecordBatch]:
    """The rows of the whole batches of an open stream that ``query`` asks for; a torn tail is passed over.

    Raises:
        CorruptRunError: a whole batch is damaged.
        FileNotFoundError: it was sealed in the meantime.
        RunUnreadableError: the operating system refuses to read it.
    """
    try:
        content = read_regular(part.path, MAX_STREAM_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunUnreadableError(f"cannot read {part.name}: {error.strerror or error}") from error
    with readable(part.name):
        found = scan(content, part.name)
        for batch in read_batches(content, found, part.name):
            columns = _columns_present(part.name, batch.schema, query)
            yield _conform(part.name, batch.select(columns), query, rank)


def open_parquet(content: bytes) -> pq.ParquetFile:
    """A Parquet file with every guard Arrow has: page checksums, limits on the footer, strings as dictionaries.

    Raises:
        pyarrow.ArrowException, OSError: it is no Parquet file.
    """
    limits = {"thrift_string_size_limit": _THRIFT_LIMIT, "thrift_container_size_limit": _THRIFT_LIMIT}
    buffer = pa.BufferReader(content)
    with pq.ParquetFile(buffer, **limits) as file:
        metadata = file.metadata
        names = [f.name for f in file.schema_arrow if f.type == pa.string()]
    return pq.ParquetFile(
        buffer,
        metadata=metadata,
        read_dictionary=names,
        page_checksum_verification=True,
        pre_buffer=False,
        **limits,
    )


def check_footer(name: str, metadata: pq.FileMetaData, listed: Part | None) -> None:
    """What a footer may claim.

    Raises:
        CorruptRunError: more than precdoctor writes, or not what parts.jsonl says.
    """
    groups = [metadata.row_group(n) for n in range(min(metadata.num_row_groups, MAX_PART_ROWS))]
    if metadata.num_rows > MAX_PART_ROWS or metadata.num_columns > MAX_COLUMNS:
        raise damaged(name, f"it claims {metadata.num_rows} rows and {metadata.num_columns} columns")
    if any(group.num_rows < 0 for group in groups) or sum(group.num_rows for group in groups) != metadata.num_rows:
        raise damaged(name, "its row counts contradict each other")
    if listed is not None and listed.rows != metadata.num_rows:
        raise damaged(name, f"it holds {metadata.num_rows} rows and parts.jsonl lists {listed.rows}")


def _columns_present(name: str, schema: pa.Schema, query: Query) -> list[str]:
    """The needed columns this part has, each of the one type it may have."""
    present = []
    for column in query.needed:
        field = TABLES[query.table].field(column)
        places = schema.get_all_field_indices(column)
        if len(places) > 1:
            raise damaged(name, f"two columns are named {column!r}")
        if places:
            if stored_type(schema.field(places[0]).type) != stored_type(field.type):
                raise damaged(name, f"column {column!r} is {schema.field(places[0]).type}, not {field.type}")
            present.append(column)
        elif not field.nullable:
            raise damaged(name, f"it has no column {column!r}")
    return present


def _may_match(metadata: pq.FileMetaData, group: int, query: Query) -> bool:
    if not query.steps:
        return True
    chunks = metadata.row_group(group)
    for n in range(chunks.num_columns):
        if chunks.column(n).path_in_schema == "step":
            statistics = chunks.column(n).statistics
            if statistics is None or not statistics.has_min_max or statistics.null_count:
                return True
            return query.may_match(statistics.min, statistics.max)
    return True


def _conform(name: str, batch: pa.RecordBatch, query: Query, rank: RankDirectory) -> pa.RecordBatch:
    """What ``query`` selects of a decoded batch, after every needed column was checked and brought to its type."""
    batch.validate(full=True)
    arrays, wanted = [], []
    for column in query.needed:
        field = TABLES[query.table].field(column)
        place = batch.schema.get_field_index(column)
        array = pa.nulls(batch.num_rows, field.type) if place < 0 else _as_type(batch.column(place), field.type)
        if not field.nullable and array.null_count:
            raise damaged(name, f"column {column!r} holds nulls")
        _check_lengths(name, column, array)
        arrays.append(array)
        wanted.append(field)
        if column == "rank" and not pc.all(pc.equal(array, rank.rank), min_count=0).as_py():
            raise damaged(name, f"it holds rows of another rank than {rank.rank}")
    arrays.append(pa.repeat(pa.scalar(rank.attempt, ATTEMPT.type), batch.num_rows))
    return query.select(pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*wanted, ATTEMPT])))


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    elif not pa.types.is_dictionary(kind) and pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if array.type == kind else array.cast(kind)


def _check_lengths(name: str, column: str, array: pa.Array) -> None:
    if pa.types.is_list(array.type):
        longest, limit = pc.max(pc.list_value_length(array)).as_py(), MAX_LIST
    else:
        text = array.dictionary if pa.types.is_dictionary(array.type) else array
        if not pa.types.is_string(text.type):
            return
        longest, limit = pc.max(pc.binary_length(text)).as_py(), MAX_STRING_BYTES
    if (longest or 0) > limit:
        raise damaged(name, f"column {column!r} holds a value of length {longest}")


def json_lines(content: bytes, where: Path) -> Iterable[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line without an end was cut off and is passed over.

    Raises:
        CorruptRunError: a line is damaged.
    """
    return [parse_json(line, where) for line in content.split(b"\n")[:-1] if line.strip()]
