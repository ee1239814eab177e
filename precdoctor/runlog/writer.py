"""Writes the rank directory of one process; runs in the training process, on the drain thread. Imports neither torch
nor pandas.

Every ``OSError`` (full disk, vanished or read-only directory) reaches the caller, which then trains without a log.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precdoctor.runlog import arrays
from precdoctor.runlog.atomic import temporary_name, write_json_atomically
from precdoctor.runlog.files import END_FILE, RANK_FILE
from precdoctor.runlog.lock import DirectoryLock, above_streams
from precdoctor.runlog.schema import TABLES
from precdoctor.runlog.sealing import seal_stream
from precdoctor.runlog.stream import StreamEncoder, stored_schema, witness_of

#: Longest string in a row: writer and readers refuse longer ones. Real rows stay far below.
MAX_STRING_BYTES: Final = 1 << 20
#: Rows of tensors and ops may fill this share of ``max_bytes``; the rest is reserved for steps and events.
_TENSOR_SHARE: Final = 0.95
_LARGE: Final = ("tensors", "ops")
#: A sealed part takes about an eighth of the bytes of its stream. Once the directory has reached the first share of
#: ``max_bytes``, streams are sealed to free room, if together they take at least the second share. What is left above
#: the first share must hold a part and its stream at the same time.
_SEAL_FOR_ROOM, _WORTH_SEALING = 0.85, 0.125

#: A stream may grow as old as this share of the time recorded before it. Otherwise a week of half-minute parts would be
#: twenty thousand, and each costs time to seal and again for every reader.
_SHARE_OF_LOG: Final = 1 / 64
#: ... while it has fewer batches than this: a follower reads the whole stream again for each new batch.
_MOST_BATCHES: Final = 256

#: Largest batch to write, in bytes of memory, because readers limit the size of one batch and of one row group.
_SLICE_BYTES: Final = 16 << 20

#: Bytes of a temporary file that is given up when the log is closed, so that on a full disk there is room to state it.
_RESERVE: Final = 16 << 10

Column: TypeAlias = Sequence[Any] | npt.NDArray[Any] | pa.Array


class DiskBudgetReached(Exception):  # noqa: N818 - a state the recorder acts on, not a defect
    """The rank directory has reached its size limit. These rows were not written; earlier rows stay."""


class RankWriter:
    """Appends rows to a rank directory. Appended rows survive the death of the process at any moment.

    Not thread-safe: one thread writes. After a ``fork`` the child's copy counts as closed and writes nothing.

    Args:
        directory: made by :func:`precdoctor.runlog.layout.create_rank_directory`; no other process writes there.
        max_bytes: size limit of the directory, in bytes; None means no limit.
        rotate_seconds: age of an open stream, in seconds of ``clock``, at which the next append seals it. In long runs
            that append only syncs the stream to disk; it is sealed once its age is a 64th of the time that the writer
            had run when the stream began, or it has 256 batches.
        rotate_bytes: size of an open stream at which it is sealed, in bytes on disk.
        clock: seconds from any origin; must be monotonic.

    Raises:
        BlockingIOError: another living writer holds this directory.
        OSError: the directory is gone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        rotate_seconds: float = 30.0,
        rotate_bytes: int = 8 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = Path(directory)
        self._max_bytes = max_bytes
        self._rotate_seconds = rotate_seconds
        self._rotate_bytes = rotate_bytes
        self._clock = clock
        self._began = clock()
        self._closed_bytes: dict[Path, int] = {}
        #: The most bytes that one append to ``tensors`` or ``ops`` has taken. The next one must not use up the bytes
        #: that are reserved for steps and events.
        self._largest_append = 0
        self._next = dict.fromkeys(TABLES, 1)
        self._open: dict[str, _OpenStream] = {}
        self._unsealed: list[_OpenStream] = []
        self._owner: int | None = os.getpid()
        self._lock = DirectoryLock(self.directory)
        self._reserve = temporary_name(self.directory / END_FILE)
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(b"\xff" * _RESERVE)

    @property
    def bytes_used(self) -> int:
        """Size on disk of the files of this writer, in bytes."""
        return sum(self._closed_bytes.values()) + sum(s.size for s in (*self._open.values(), *self._unsealed))

    def append(self, table: str, columns: Mapping[str, Column], rows: int) -> None:
        """Append ``rows`` rows and hand them to the operating system: a SIGKILL after the return loses none of them.

        Args:
            table: ``tensors``, ``steps``, ``events`` or ``ops``.
            columns: by name, each of length ``rows``; nullable columns may be left out and become null. NaN stays NaN;
                None becomes null.
            rows: number of rows; 0 does nothing.

        Raises:
            DiskBudgetReached: the directory has reached ``max_bytes``; nothing was written.
            ValueError: the writer is closed, or the columns do not match the schema; nothing was written.
            OSError: the disk is full, or the directory gone or read-only; the rows may be lost.
        """
        if self._owner != os.getpid():
            raise ValueError("this writer is closed, or belongs to another process")
        batch = build_batch(table, columns, rows)
        if rows == 0:
            return
        if self._max_bytes is not None:
            self._make_room(self._max_bytes)
            limit = self._max_bytes * _TENSOR_SHARE - self._largest_append if table in _LARGE else self._max_bytes
            if self.bytes_used >= limit:
                raise DiskBudgetReached(f"{self.directory} has reached its limit of {self._max_bytes} bytes")
        before = self.bytes_used
        some = 1 if rows == 1 else max(1, rows * _SLICE_BYTES // max(1, batch.nbytes))
        for at in range(0, rows, some):
            self._write(table, batch if some >= rows else batch.slice(at, some))
        if table in _LARGE:
            self._largest_append = max(self._largest_append, self.bytes_used - before)

    def _make_room(self, budget: int) -> None:
        """Seal the open streams if ``budget`` bytes are nearly used up and sealing frees enough of them."""
        open_bytes = sum(stream.size for stream in self._open.values())
        if self.bytes_used >= budget * _SEAL_FOR_ROOM and open_bytes >= budget * _WORTH_SEALING:
            self._unsealed.extend(self._open.values())
            self._open.clear()
            self._seal()

    def _write(self, table: str, batch: pa.RecordBatch) -> None:
        stream = self._open.get(table)
        if stream is None:
            stream = _OpenStream(self.directory, table, self._next[table], self._clock())
            self._open[table] = stream
            self._next[table] += 1
        try:
            streams = (*self._open.values(), *self._unsealed)
            beside = {s.name: (s.size, s.digest) for s in streams if s is not stream and s.size}
            stream.append(batch, witness_of(stream.name, beside))
        except OSError:
            # The batches already in the stream are whole; the next append starts a new stream.
            self._unsealed.append(self._open.pop(table))
            raise
        now = self._clock()
        longest = (stream.since - self._began) * _SHARE_OF_LOG if stream.batches < _MOST_BATCHES else 0.0
        if stream.size >= self._rotate_bytes or now - stream.since >= max(self._rotate_seconds, longest):
            self._unsealed.append(self._open.pop(table))
            self._seal()
        elif now - stream.synced >= self._rotate_seconds:
            stream.sync(now)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Replace rank.json by ``facts``. Call only from the writing thread, as often as facts change.

        Raises:
            OSError: the disk is full, or the directory gone or read-only; the old file is still there.
        """
        path = self.directory / RANK_FILE
        write_json_atomically(path, facts)
        self._closed_bytes[path] = path.stat().st_size

    def close(self, end: Mapping[str, Any]) -> None:
        """Seal every stream, the smallest first, then write end.json with the content ``end``.

        A second call does nothing.

        Raises:
            OSError: the disk is full, or the directory gone or read-only. Parts sealed so far stay; the other streams
                can be sealed later by :func:`precdoctor.runlog.seal`; end.json is there if there was room for it.
        """
        if self._owner != os.getpid():
            return
        self._unsealed = sorted((*self._unsealed, *self._open.values()), key=lambda stream: stream.size)
        self._open.clear()
        try:
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)
            try:
                self._seal()
            finally:
                write_json_atomically(self.directory / END_FILE, end)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close all files and release the lock without sealing, as the death of the process would."""
        self._owner = None
        for stream in (*self._open.values(), *self._unsealed):
            stream.close()
        self._open.clear()
        self._unsealed.clear()
        self._lock.release()

    def _seal(self) -> None:
        """Seal the streams that get no more rows. If that fails, the stream stays readable; the next call retries."""
        while self._unsealed:
            stream = self._unsealed[0]
            part = seal_stream(self.directory, stream.table, stream.number, stream.content())
            if part is not None:
                path = self.directory / part.name
                self._closed_bytes[path] = path.stat().st_size
            stream.path.unlink(missing_ok=True)
            stream.close()
            del self._unsealed[0]


class _OpenStream:
    """One ``*.arrows.open`` file. It is read back through its own handle, so another process may unlink the name."""

    def __init__(self, directory: Path, table: str, number: int, since: float) -> None:
        self.name = f"{table}-{number:06d}"
        self.path = directory / f"{self.name}.arrows.open"
        self.table = table
        self.number = number
        self.since = self.synced = since
        self.size = self.batches = 0
        self.digest = ""
        self._encoder = StreamEncoder(stored_schema(table))
        self._handle = above_streams(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def append(self, batch: pa.RecordBatch, witness: str) -> None:
        """Write the whole batch or nothing. After an OSError append no more: the encoder counts the lost batch."""
        frame = memoryview(self._encoder.encode(batch, witness))
        at = self.size
        try:
            while frame:
                written = os.pwrite(self._handle, frame, at)
                at, frame = at + written, frame[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self.size)
            raise
        self.size, self.batches, self.digest = at, self.batches + 1, self._encoder.digest

    def sync(self, now: float) -> None:
        """Write the batches appended so far through to the disk, so that they survive a crash of the machine."""
        os.fsync(self._handle)
        self.synced = now

    def content(self) -> bytes:
        """The bytes appended so far."""
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            return file.read(self.size)

    def close(self) -> None:
        """Close the handle; the file stays."""
        os.close(self._handle)


def build_batch(table: str, columns: Mapping[str, Column], rows: int) -> pa.RecordBatch:
    """A batch of the stored schema of ``table`` from ``columns``; a nullable column left out becomes null.

    Raises:
        ValueError: unknown table or column, wrong length or type, a required column absent or with nulls, or a string
            longer than ``MAX_STRING_BYTES``.
    """
    if table not in TABLES:
        raise ValueError(f"no table {table!r}; there are {', '.join(TABLES)}")
    schema, fields = stored_schema(table), _fields(table)
    if unknown := columns.keys() - fields.keys():
        raise ValueError(f"{table} has no column {min(unknown)!r}")
    batch_columns = []
    for name, (field, kind, nullable, is_text) in fields.items():
        values = columns.get(name)
        array = _nulls(rows, kind) if values is None else _array(values, field)
        if len(array) != rows:
            raise ValueError(f"{table}.{name} has {len(array)} values for {rows} rows")
        if not nullable and array.null_count:
            raise ValueError(f"{table}.{name} may not be null")
        if is_text and _has_long_string(array):
            raise ValueError(f"{table}.{name} holds a string of more than {MAX_STRING_BYTES} bytes")
        batch_columns.append(array)
    return pa.RecordBatch.from_arrays(batch_columns, schema=schema)


@functools.cache
def _fields(table: str) -> dict[str, tuple[pa.Field, pa.DataType, bool, bool]]:
    """``name -> (field, type, nullable, is text)``. Cached because Arrow builds these objects anew at each access."""
    return {f.name: (f, f.type, f.nullable, f.type == pa.string()) for f in stored_schema(table)}


def _nulls(rows: int, kind: pa.DataType) -> pa.Array:
    """A column of ``rows`` nulls; cached for one row, because unsampled steps are written row by row, a third null."""
    return _one_null(kind) if rows == 1 else pa.nulls(rows, kind)


@functools.cache
def _one_null(kind: pa.DataType) -> pa.Array:
    return pa.nulls(1, kind)


def _has_long_string(strings: pa.Array) -> bool:
    """Return whether a string is longer than ``MAX_STRING_BYTES``; quick if all strings together are not."""
    if strings.nbytes <= MAX_STRING_BYTES:
        return False
    return max((len(text.encode()) for text in strings.to_pylist() if text is not None), default=0) > MAX_STRING_BYTES


def _array(values: Column, field: pa.Field) -> pa.Array:
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
            if pa.types.is_dictionary(array.type):
                array = array.dictionary_decode()
            return array if array.type == field.type else array.cast(field.type)
        if (array := arrays.column(values, field.type)) is not None:
            return array
        if isinstance(values, np.ndarray) and values.ndim > 1:
            values = list(values)
        return pa.array(values, field.type, from_pandas=False)
    except UnicodeEncodeError:  # file names that are not UTF-8 reach Python as lone surrogates
        return arrays.strings([None if v is None else v.encode("utf-8", "backslashreplace").decode() for v in values])
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(f"column {field.name!r} does not hold {field.type}: {error}") from error
