"""Turns open streams into sealed parts: write temp -> fsync -> rename -> list in parts.jsonl -> unlink the stream.

If the process dies at any point, no row is lost or counted twice: until it is unlinked the stream holds all rows, and
once the part of the same number is listed, readers ignore the stream.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from precdoctor.errors import CorruptRunError
from precdoctor.runlog.atomic import sync_directory, temporary_name
from precdoctor.runlog.files import OPEN_PART, PARTS_FILE, TEMPORARY
from precdoctor.runlog.layout import files_matching, rank_directories, read_regular
from precdoctor.runlog.lock import is_locked
from precdoctor.runlog.stream import MAX_STREAM_BYTES, read_batches, scan, stored_schema

#: Most rows of a row group: large enough that the column metadata is negligible per row.
ROW_GROUP_ROWS: Final = 1 << 16
#: ... and its most bytes in memory, exceeded by less than a batch.
ROW_GROUP_BYTES: Final = 32 << 20
DIGEST_BYTES: Final = 16
#: More batches than this are joined before they are written.
_MANY_BATCHES: Final = 8

#: Columns with few distinct values per part, besides names; they are dictionary-encoded.
_REPEATING: Final = ("step", "rank", "call", "micro_step", "numel", "scale")


@dataclass(frozen=True)
class Part:
    """A line of parts.jsonl: a sealed part. ``blake2b`` (16 bytes, hexadecimal) is the checksum of the whole file."""

    name: str
    rows: int
    first_step: int | None
    last_step: int | None
    blake2b: str


def digest_of(content: bytes) -> str:
    """The checksum of the content of a part, as parts.jsonl states it."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def seal_stream(directory: Path, table: str, number: int, data: bytes) -> Part | None:
    """Write the whole batches of one stream as ``TABLE-NUMBER.parquet`` and list it in parts.jsonl.

    ``data`` is the content of the stream file, which the caller unlinks afterwards. Returns None, and writes nothing,
    if the stream holds no whole batch.

    Raises:
        CorruptRunError: the stream is damaged; nothing was written.
        OSError: the disk is full, or the directory gone or read-only; until the part is listed, the stream counts.
    """
    name = f"{table}-{number:06d}.parquet"
    where = f"{directory.name}/{table}-{number:06d}.arrows.open"
    scanned = scan(data, where)
    if scanned.batches == 0:
        return None
    target = directory / name
    temporary = temporary_name(target)
    try:
        rows, first, last = _write_parquet(temporary, table, read_batches(data, scanned, where))
        content = temporary.read_bytes()
        temporary.replace(target)
    except pa.ArrowException as error:
        raise CorruptRunError(f"{where} is damaged: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(directory)
    part = Part(name, rows, first, last, digest_of(content))
    append_line(directory / PARTS_FILE, asdict(part))
    return part


def _write_parquet(path: Path, table: str, batches: Iterator[pa.RecordBatch]) -> tuple[int, int | None, int | None]:
    """Write and sync a Parquet file; return ``(rows, first step, last step)``."""
    schema = stored_schema(table)
    with path.open("x+b") as file:
        with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema, **_encoding(schema)) as writer:
            for group in _row_groups(batches, schema):
                writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
        file.flush()
        os.fsync(file.fileno())
        # Not from a metadata_collector: with one, pyarrow's writer cannot be closed on a full disk.
        footer = pq.read_metadata(file)
    return footer.num_rows, *_steps_of(footer, schema.get_field_index("step"))


def _steps_of(footer: pq.FileMetaData, column: int) -> tuple[int | None, int | None]:
    """``(first step, last step)`` of a file, from its statistics; None if no row has a step.

    Avoids ``pyarrow.compute``, whose import takes 60 ms.
    """
    groups = (footer.row_group(i).column(column).statistics for i in range(footer.num_row_groups))
    bounds = [(s.min, s.max) for s in groups if s is not None and s.has_min_max]
    return min((low for low, _ in bounds), default=None), max((high for _, high in bounds), default=None)


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        pending.append(batch)
        # get_total_buffer_size, because nbytes takes longer than decoding the batch.
        rows, size = rows + batch.num_rows, size + batch.get_total_buffer_size()
        if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield _joined(pending, schema)
            pending, rows, size = [], 0, 0
    if pending:
        yield _joined(pending, schema)


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """One table from ``batches``. If they are many, joins them first: Parquet's writer takes longer for many chunks."""
    table = pa.Table.from_batches(batches, schema)
    return table.combine_chunks() if len(batches) > _MANY_BATCHES else table


def _encoding(schema: pa.Schema) -> dict[str, object]:
    """Parquet options: encodings that every current reader supports, page checksums, statistics for ``step`` alone."""
    repeating = [f.name for f in schema if f.type == pa.string() or f.name in _REPEATING]
    floats = [f.name for f in schema if pa.types.is_floating(f.type) and f.name not in repeating]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": repeating,
        # Most values were float32 before: their low mantissa bytes are zero, and this encoding puts them together.
        "column_encoding": dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        "write_statistics": ["step"],
        "write_page_checksum": True,
        "store_schema": False,
    }


def append_line(path: Path, content: dict[str, object]) -> None:
    """Append one JSON line in one write and sync the file. An incomplete last line, left by a crash, is removed first.

    Raises:
        OSError: the disk is full, or the directory gone or read-only.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        whole = file.read().rfind(b"\n") + 1
        if whole < file.tell():
            file.truncate(whole)
        line = json.dumps(content).encode() + b"\n"
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path.name)
        os.fsync(handle)


def seal(run: Path) -> list[str]:
    """Seal the streams that dead processes of a run left open. The parent calls it after the command has ended.

    Whole batches become parts, a torn tail is dropped, temporary files of dead writers are removed. A rank directory
    whose writer is alive (a detached process that holds the lock) is skipped. On a file system without locks a stream
    may be sealed under a living writer, which then replaces the part when it seals. A damaged stream stays as it is,
    for ``log verify`` to show. May be called any number of times.

    Returns:
        The sealed parts, as ``rank-00000/tensors-000001.parquet``.

    Raises:
        OSError: the disk is full, or the directory gone or read-only.
    """
    sealed = []
    for rank in rank_directories(Path(run)):
        if is_locked(rank.path):
            continue
        for match, path in list(files_matching(rank.path, OPEN_PART)):
            try:
                part = seal_stream(rank.path, match[1], int(match[2]), read_regular(path, MAX_STREAM_BYTES))
            except CorruptRunError:
                continue
            path.unlink(missing_ok=True)
            if part is not None:
                sealed.append(f"{rank.path.name}/{part.name}")
        for _, path in files_matching(rank.path, TEMPORARY):
            path.unlink(missing_ok=True)
    return sealed
