"""Encodes, checks and decodes the part being written: an Arrow IPC stream with a checksum in every batch.

Arrow's stream has no checksums of its own. Each batch here carries, as custom metadata, the BLAKE2b of everything
in the file up to and including itself, its own digest read as zeros. A batch is therefore whole and right, or cut off
by the end of the file (the process was killed inside a write), or damaged; only whole batches are read.
Each batch also names its own stream, and states size and digest of the process's other open streams. From that, ``log
verify`` finds streams that were cut, removed or exchanged after the process had ended.

The format of the frames is the encapsulated message format of the Arrow columnar specification, section "Serialization
and Interprocess Communication"; the two FlatBuffers tables read by hand below are Message and RecordBatch of its
Message.fbs. Arrow itself checks them again when it decodes a batch. They are read here to find the end of a frame and
the size it claims to decompress to, *before* anything is decompressed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from precdoctor.errors import CorruptRunError
from precdoctor.runlog.schema import TABLES

#: Largest stream file. A stream is sealed at 8 MiB by default, which its last batch may exceed.
MAX_STREAM_BYTES: Final = 256 << 20
#: Most bytes of one batch when decompressed.
MAX_BATCH_BYTES: Final = 512 << 20

_KEY: Final = "precdoctor.blake2b"
_WITNESS: Final = b"precdoctor.streams"
_MARK: Final = b"blake2b="
_DIGEST: Final = 32  # hexadecimal digits
_BLANK: Final = b"0" * _DIGEST
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_SCHEMA_MESSAGE: Final = 1
_BATCH_MESSAGE: Final = 3


@functools.cache
def stored_schema(table: str) -> pa.Schema:
    """The columns of a table as files hold them: names are plain strings, which readers turn into dictionaries."""
    return pa.schema([pa.field(f.name, stored_type(f.type), f.nullable) for f in TABLES[table]])


def stored_type(kind: pa.DataType) -> pa.DataType:
    """The type a file stores for a column of the schema."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


class StreamEncoder:
    """Encodes batches as the bytes to append to a stream file; the bytes of the first call begin with the schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = io.BytesIO()
        # LZ4 is four times as fast as the zstd of sealed parts. Arrow's threads would compete with the training's.
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._writer = pa.ipc.new_stream(self._sink, schema, options=options)
        self._sum = hashlib.blake2b(digest_size=_DIGEST // 2)

    @property
    def digest(self) -> str:
        """The digest of all bytes encoded so far, as the last frame states it."""
        return self._sum.hexdigest()

    def encode(self, batch: pa.RecordBatch, witness: str = "") -> bytes:
        """The bytes of one batch, with its checksum and the text ``witness`` (see :func:`witness_of`) as metadata."""
        self._writer.write_batch(batch, custom_metadata={_KEY: _MARK + _BLANK, _WITNESS: witness})
        frame = bytearray(self._sink.getbuffer())
        self._sink.seek(0)
        self._sink.truncate()
        self._sum.update(frame)
        at = frame.index(_MARK + _BLANK) + len(_MARK)
        frame[at : at + _DIGEST] = self._sum.hexdigest().encode()
        return bytes(frame)


@dataclass(frozen=True)
class StreamScan:
    """The content of a stream file.

    Attributes:
        batches: number of whole batches.
        good_bytes: bytes that they take, from the start of the file.
        torn: whether an incomplete write follows them.
        ends: the digest that each whole batch states, by the byte at which the batch ends.
    """

    batches: int
    good_bytes: int
    torn: bool
    ends: dict[int, str]


@dataclass(frozen=True)
class Witness:
    """The witness in the last batch of a stream: the stream's name, and ``name -> (size, digest)`` of the other streams
    that the process had open.
    """

    name: str
    beside: dict[str, tuple[int, str]]


def witness_of(name: str, beside: dict[str, tuple[int, str]]) -> str:
    """The text of a witness, which :func:`read_witness` parses."""
    return " ".join([name, *(f"{other}:{size}:{digest}" for other, (size, digest) in beside.items())])


def read_witness(data: bytes, found: StreamScan) -> Witness | None:
    """The witness in the last whole batch of a scanned stream; None if it has none (an older version wrote it).

    Raises:
        ValueError: the witness cannot be parsed.
        pyarrow.ArrowException: the stream cannot be read.
    """
    text = b""
    with pa.ipc.open_stream(memoryview(data)[: found.good_bytes]) as reader:
        for _ in range(found.batches):
            metadata = reader.read_next_batch_with_custom_metadata().custom_metadata
            text = b"" if metadata is None else metadata.get(_WITNESS, b"")
    name, *rest = text.decode().split(" ")
    fields = [entry.split(":") for entry in rest]
    if any(len(f) != 3 for f in fields):
        raise ValueError("what it says of the streams beside it cannot be read")
    return Witness(name, {f[0]: (int(f[1]), f[2]) for f in fields}) if name else None


def scan(data: bytes, where: str) -> StreamScan:
    """Check every frame of a stream.

    Raises:
        CorruptRunError: a whole frame is damaged; the message names ``where``.
    """
    total = hashlib.blake2b(digest_size=_DIGEST // 2)
    batches = good = at = 0
    ends: dict[int, str] = {}
    while at < len(data):
        frame = _frame(data, at, where)
        if frame is None:
            # An incomplete write leaves one frame at most. Two marks mean that a stated length is wrong.
            if data.count(_MARK, at) > 1:
                raise _damaged(where, at)
            return StreamScan(batches, good, torn=True, ends=ends)
        kind, metadata_end, end = frame
        if kind == _SCHEMA_MESSAGE and at == 0:
            total.update(data[at:end])
        elif kind == _BATCH_MESSAGE and at > 0:
            mark = data.find(_MARK, at, metadata_end)
            if mark < 0 or mark + len(_MARK) + _DIGEST > metadata_end:
                raise _damaged(where, at)
            start, stop = mark + len(_MARK), mark + len(_MARK) + _DIGEST
            total.update(data[at:start])
            total.update(_BLANK)
            total.update(data[stop:end])
            if total.hexdigest().encode() != data[start:stop]:
                raise _damaged(where, at)
            batches, good = batches + 1, end
            ends[end] = total.hexdigest()
        else:
            raise _damaged(where, at)
        at = end
    return StreamScan(batches, good, torn=good < len(data), ends=ends)


def read_batches(data: bytes, found: StreamScan, where: str) -> Iterator[pa.RecordBatch]:
    """The whole batches of a scanned stream, validated, with the schema that the file states.

    Raises:
        CorruptRunError: Arrow cannot decode a batch.
    """
    if found.batches == 0:
        return
    try:
        source = pa.BufferReader(memoryview(data)[: found.good_bytes])
        with pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            for _ in range(found.batches):
                batch = reader.read_next_batch()
                batch.validate(full=True)
                yield batch
    except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, StopIteration) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise CorruptRunError(f"{where} is damaged: {first_line}") from error


def _frame(data: bytes, at: int, where: str) -> tuple[int, int, int] | None:
    """``(message kind, end of metadata, end of body)`` of the frame at ``at``; None if the file ends inside it.

    Raises:
        CorruptRunError: the frame is damaged, or claims to decompress to too many bytes.
    """
    if len(data) - at < 8:
        return None
    if data[at : at + 4] != _CONTINUATION:
        if not data[at:].strip(b"\0"):
            return None  # zeros after the last write: a power loss can extend a file without its data
        raise _damaged(where, at)
    (length,) = struct.unpack_from("<i", data, at + 4)
    start = at + 8
    if length <= 0 or length > MAX_STREAM_BYTES:
        raise _damaged(where, at)
    if start + length > len(data):
        return None
    try:
        kind, body, claim = _message(memoryview(data)[start : start + length], memoryview(data)[start + length :])
    except (struct.error, IndexError, ValueError) as error:
        raise _damaged(where, at) from error
    if body < 0 or claim > MAX_BATCH_BYTES:
        raise CorruptRunError(f"{where} is damaged: a batch at byte {at} claims to decompress to {claim} bytes")
    end = start + length + body
    return (kind, start + length, end) if end <= len(data) else None


def _message(metadata: memoryview, rest: memoryview) -> tuple[int, int, int]:
    """``(kind, bytes of body, bytes that the body claims to decompress to)`` of one FlatBuffers Message.

    struct.error, IndexError or ValueError if ``metadata`` is none.
    """
    message = _unpack("<I", metadata, 0)
    kind = _field(metadata, message, 1, "<B") or 0
    body = _field(metadata, message, 3, "<q") or 0
    claim = 0
    if kind == _BATCH_MESSAGE:
        batch = _table(metadata, message, 2)
        compressed = _slot(metadata, batch, 3) is not None
        if (where := _slot(metadata, batch, 2)) is not None:
            vector = where + _unpack("<I", metadata, where)
            size = 16 * _unpack("<I", metadata, vector)
            buffers = metadata[vector + 4 : vector + 4 + size]
            if len(buffers) != size:
                raise ValueError("a message whose buffers are not in it")
            for offset, length in struct.iter_unpack("<qq", buffers):
                claim += length
                if compressed and length >= 8 and offset + 8 <= len(rest):
                    claim += max(0, _unpack("<q", rest, offset))
    return kind, body, claim


def _unpack(layout: str, data: memoryview, offset: int) -> int:
    if offset < 0:
        raise ValueError("an offset below zero")
    return struct.unpack_from(layout, data, offset)[0]


def _slot(data: memoryview, table: int, field: int) -> int | None:
    """The offset of a field of a FlatBuffers table; None if the field is absent."""
    vtable = table - _unpack("<i", data, table)
    if 4 + 2 * field >= _unpack("<H", data, vtable):
        return None
    offset = _unpack("<H", data, vtable + 4 + 2 * field)
    return table + offset if offset else None


def _field(data: memoryview, table: int, field: int, layout: str) -> int | None:
    where = _slot(data, table, field)
    return None if where is None else _unpack(layout, data, where)


def _table(data: memoryview, table: int, field: int) -> int:
    where = _slot(data, table, field)
    if where is None:
        raise ValueError("a message without content")
    return where + _unpack("<I", data, where)


def _damaged(where: str, at: int) -> CorruptRunError:
    return CorruptRunError(f"{where} is damaged at byte {at}")
