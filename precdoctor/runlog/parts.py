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
from precdoctor.runlog.pages import RowGroup, check_pages, read_footer
from precdoctor.runlog.schema import OPEN_PART, PARTS_FILE, SEALED_PART, TABLES
from precdoctor.runlog.sealing import Part, digest_of
from precdoctor.runlog.stream import MAX_STREAM_BYTES, read_batches, scan, stored_type
from precdoctor.runlog.writer import MAX_STRING_BYTES

MAX_PART_BYTES: Final = 512 << 20
MAX_PARTS: Final = 1 << 20
#: Longest list in a row: a histogram has about 320 bins, a shape a handful of dimensions.
MAX_LIST: Final = 1 << 16
#: Text of one column in one batch of rows.
MAX_TEXT_BYTES: Final = 256 << 20
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
    return CorruptRunError(f"{name} is damaged ({line[:200]})")


def read_manifest(directory: Path) -> dict[str, Part]:
    """The lines of parts.jsonl by name of the part; of two for one part the last holds.

    Raises:
        CorruptRunError: a line is damaged. (One cut off at the end is not: its part still has its stream.)
        OSError: the file is there but cannot be read.
    """
    where = Path(directory.name) / PARTS_FILE
    try:
        lines = json_lines(read_regular(directory / PARTS_FILE, MAX_JSON_BYTES), where)
    except FileNotFoundError:
        return {}
    parts = [_part(line) for line in lines]
    if None in parts:
        raise CorruptRunError(f"{where} is damaged: line {parts.index(None) + 1} lists no part")
    return {part.name: part for part in parts if part is not None}


def _part(line: dict[str, Any]) -> Part | None:
    values = [line.get(f.name) for f in fields(Part)]
    name, rows, first, last, digest = values
    numbers = all(n is None or (isinstance(n, int) and not isinstance(n, bool)) for n in (first, last))
    if not (isinstance(name, str) and SEALED_PART.fullmatch(name) and isinstance(digest, str) and numbers):
        return None
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
        return None
    return Part(name, rows, first, last, digest)


@dataclass(frozen=True)
class Survey:
    """What a rank directory holds: ``files`` with rows, by table and number, and what parts.jsonl lists, by name."""

    files: list[PartFile]
    listed: dict[str, Part]

    @property
    def missing(self) -> list[str]:
        """Parts that are listed and not there."""
        return sorted(set(self.listed) - {file.path.name for file in self.files})

    @property
    def unlisted(self) -> list[str]:
        """Sealed parts that no line and no stream vouches for."""
        return [file.path.name for file in self.files if file.sealed and file.path.name not in self.listed]


def survey(directory: Path) -> Survey:
    """Look at a rank directory, which may be growing.

    A part counts once it is listed; until then its stream does. (Sealing renames, then lists, then unlinks the stream.)

    Raises:
        CorruptRunError: parts.jsonl is damaged, or there are more parts than any rank has.
        OSError: the directory or parts.jsonl cannot be read.
    """
    listed = read_manifest(directory)
    found = _survey(directory, listed)
    if found.unlisted:  # sealed between the two looks: by now it is listed
        found = _survey(directory, read_manifest(directory))
    return found


def _survey(directory: Path, listed: dict[str, Part]) -> Survey:
    found: dict[tuple[str, int], PartFile] = {}
    for pattern, sealed in ((OPEN_PART, False), (SEALED_PART, True)):
        for match, path in files_matching(directory, pattern):
            key = match[1], int(match[2])
            if key not in found or path.name in listed:
                found[key] = PartFile(path, *key, sealed)
    if len(found) > MAX_PARTS:
        raise CorruptRunError(f"{directory.name} holds {len(found)} parts; no rank has that many")
    return Survey([found[key] for key in sorted(found)], listed)


#: By path, time of change and size, the parts whose checksum was found right; of the first ones with their footers,
#: which cost more to read than a few columns.
Sound = dict[tuple[str, float, int], list[RowGroup] | None]
_MAX_FOOTERS = 256


def read_sealed(
    part: PartFile, listed: Part | None, query: Query, rank: RankDirectory, sound: Sound
) -> Iterator[pa.RecordBatch]:
    """The rows of a sealed part that ``query`` asks for.

    Args:
        part: the file.
        listed: its line in parts.jsonl; a part without one is refused.
        query: columns and rows.
        rank: the directory.
        sound: the parts whose checksum was found right, remembered for the next query.

    Raises:
        CorruptRunError: the part is not what was written, or nothing precdoctor would write.
        RunUnreadableError: the operating system refuses to read it.
    """
    with readable(part.name):
        if listed is None:
            raise damaged(part.name, "parts.jsonl does not list it")
        changed = part.path.lstat().st_mtime
        content = read_regular(part.path, MAX_PART_BYTES)
        key = (str(part.path), changed, len(content))
        if key not in sound:
            if digest_of(content) != listed.blake2b:
                raise damaged(part.name, "its checksum is not the one in parts.jsonl")
            sound[key] = read_footer(content) if len(sound) < _MAX_FOOTERS else None
        groups = sound[key] or read_footer(content)
        if sum(group.rows for group in groups) != listed.rows:
            raise damaged(part.name, f"parts.jsonl lists {listed.rows} rows, and it holds another number")
        wanted = [n for n, group in enumerate(groups) if _may_match(group, query)]
        if not wanted:
            return
        for n in wanted:
            check_pages(content, groups[n], query.needed)
        seen = 0
        with _open_parquet(content) as file:
            columns = _columns_present(part.name, file.schema_arrow, query)
            for batch in file.iter_batches(BATCH_ROWS, row_groups=wanted, columns=columns):
                seen += batch.num_rows
                yield _conform(part.name, batch, query, rank)
        if seen != sum(groups[n].rows for n in wanted):
            raise damaged(part.name, f"it holds {seen} rows and claims another number")


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
        for batch in _joined(read_batches(content, found, part.name)):
            columns = _columns_present(part.name, batch.schema, query)
            yield _conform(part.name, batch.select(columns), query, rank)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A stream has a batch per step; whoever reads them pays by the batch."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows = [], 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _open_parquet(content: bytes) -> pq.ParquetFile:
    """A Parquet file with every guard Arrow has: page checksums, limits on the footer, strings as dictionaries."""
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


def _may_match(group: RowGroup, query: Query) -> bool:
    bounds = next((chunk.bounds for chunk in group.chunks if chunk.path == ("step",)), None)
    return bounds is None or query.may_match(*bounds)


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
        if (pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0) > MAX_TEXT_BYTES:
            raise ValueError("its strings unfold to more than any log holds")
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


def json_lines(content: bytes, where: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line without an end was cut off and is passed over.

    Raises:
        CorruptRunError: a line is damaged.
    """
    return [parse_json(line, where) for line in content.split(b"\n")[:-1] if line.strip()]
