"""Reads one part of a log that nobody vouches for: checked before, while and after it is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precdoctor.errors import CorruptRunError, RunUnreadableError
from precdoctor.runlog.filters import ATTEMPT, Query
from precdoctor.runlog.kept import Kept, Stamp, stamp_of
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


def read_sealed(
    part: PartFile, listed: Part | None, query: Query, rank: RankDirectory, kept: Kept
) -> Iterator[pa.RecordBatch]:
    """The rows of a sealed part that ``query`` asks for.

    Args:
        part: the file.
        listed: its line in parts.jsonl; a part without one is refused.
        query: columns and rows.
        rank: the directory.
        kept: what earlier queries found in this part and the others of the run.

    Raises:
        CorruptRunError: the part is not what was written, or nothing precdoctor would write.
        RunUnreadableError: the operating system refuses to read it.
    """
    with readable(part.name):
        if listed is None:
            raise damaged(part.name, "parts.jsonl does not list it")
        stamp = stamp_of(part.path)
        columns = kept.columns(stamp)
        missing = [name for name in query.needed if name not in columns]
        if missing:
            asked_again = kept.is_sound(stamp)
            content, groups = _sound_content(part, listed, stamp, kept)
            wanted = [n for n, group in enumerate(groups) if _may_match(group, query)]
            if not wanted:
                return
            if not (asked_again and kept.has_room and 0 < listed.rows <= BATCH_ROWS):
                for batch in _decode(part.name, content, groups, wanted, query.table, query.needed):
                    yield query.select(_from_process(_checked(part.name, batch, query.table, query.needed, rank), rank))
                return
            every = _decode(part.name, content, groups, range(len(groups)), query.table, missing)
            batch = _one([_checked(part.name, batch, query.table, missing, rank) for batch in every])
            columns = kept.keep(stamp, dict(zip(missing, batch.columns, strict=True)))
        whole = pa.RecordBatch.from_arrays(
            [columns[name] for name in query.needed],
            schema=pa.schema([TABLES[query.table].field(name) for name in query.needed]),
        )
        yield query.select(_from_process(whole, rank))


def _sound_content(part: PartFile, listed: Part, stamp: Stamp, kept: Kept) -> tuple[bytes, list[RowGroup]]:
    """The bytes of a part and its row groups, after they were held against its line in parts.jsonl."""
    content = read_regular(part.path, MAX_PART_BYTES)
    if not kept.is_sound(stamp) or len(content) != stamp[-1]:
        if digest_of(content) != listed.blake2b:
            raise damaged(part.name, "its checksum is not the one in parts.jsonl")
        kept.found_sound(stamp, read_footer(content))
    groups = kept.footer(stamp) or read_footer(content)
    if sum(group.rows for group in groups) != listed.rows:
        raise damaged(part.name, f"parts.jsonl lists {listed.rows} rows, and it holds another number")
    return content, groups


def _decode(
    name: str, content: bytes, groups: Sequence[RowGroup], wanted: Sequence[int], table: str, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """These columns of these row groups, as the file has them, some thousand rows at a time."""
    for n in wanted:
        check_pages(content, groups[n], names)
    seen = 0
    with _open_parquet(content) as file:
        columns = _columns_present(name, file.schema_arrow, table, names)
        for batch in file.iter_batches(BATCH_ROWS, row_groups=list(wanted), columns=columns):
            seen += batch.num_rows
            yield batch
    if seen != sum(groups[n].rows for n in wanted):
        raise damaged(name, f"it holds {seen} rows and claims another number")


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
            columns = _columns_present(part.name, batch.schema, query.table, query.needed)
            sound = _checked(part.name, batch.select(columns), query.table, query.needed, rank)
            yield query.select(_from_process(sound, rank))


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A stream has a batch per step; whoever reads them pays by the batch."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield _one(held)
            held, rows = [], 0
    if rows:
        yield _one(held)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """At least one row, in one batch."""
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks().to_batches()
    return batch


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


def _columns_present(name: str, schema: pa.Schema, table: str, names: Sequence[str]) -> list[str]:
    """Those of the named columns that this part has, each of the one type it may have."""
    present = []
    for column in names:
        field = TABLES[table].field(column)
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


def _checked(name: str, batch: pa.RecordBatch, table: str, names: Sequence[str], rank: RankDirectory) -> pa.RecordBatch:
    """The named columns of a decoded batch, each checked and brought to its type; absent ones are null."""
    batch.validate(full=True)
    arrays, fields_ = [], []
    for column in names:
        field = TABLES[table].field(column)
        place = batch.schema.get_field_index(column)
        array = pa.nulls(batch.num_rows, field.type) if place < 0 else _as_type(batch.column(place), field.type)
        if not field.nullable and array.null_count:
            raise damaged(name, f"column {column!r} holds nulls")
        _check_lengths(name, column, array)
        arrays.append(array)
        fields_.append(field)
        if column == "rank" and not pc.all(pc.equal(array, rank.rank), min_count=0).as_py():
            raise damaged(name, f"it holds rows of another rank than {rank.rank}")
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields_))


def _from_process(batch: pa.RecordBatch, rank: RankDirectory) -> pa.RecordBatch:
    """The batch with a column for the attempt, which no file states."""
    return batch.append_column(ATTEMPT, pa.repeat(pa.scalar(rank.attempt, ATTEMPT.type), batch.num_rows))


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
