"""Checks the footer and the page headers of a Parquet part before Arrow decodes it.

A hostile file can claim anything: two megabytes of zeros and run lengths can unfold into many gigabytes, and a
contradictory footer can crash the interpreter inside Arrow. These structs govern what Arrow decodes. They must agree
with each other, lie inside the file, stay within the limits below, and use only encodings whose output is bounded
(those precdoctor writes). They are Thrift structs in the compact protocol, defined in parquet.thrift of the Parquet
format; the code uses the field numbers of that file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

#: Largest page when unpacked. The writer aims at 1 MiB, but with very long strings a page can be a whole row group.
MAX_PAGE_BYTES: Final = 64 << 20
#: A column of one row group when unpacked; a row group is closed at 32 MiB, plus one batch.
MAX_CHUNK_BYTES: Final = 256 << 20
#: Values of a column of one row group, those inside lists included.
MAX_CHUNK_VALUES: Final = 1 << 25
#: Values of all columns of one row group: 512 MiB when unpacked.
MAX_GROUP_VALUES: Final = 1 << 26
MAX_ROWS: Final = 1 << 24
#: All columns of one row group take about 6 kB.
MAX_FOOTER_BYTES: Final = 2 << 20

_MAGIC: Final = b"PAR1"
_DATA_PAGE: Final = 0
_DICTIONARY_PAGE: Final = 2
#: PLAIN, PLAIN_DICTIONARY, RLE, BIT_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT: bounded by page size and value count.
_ENCODINGS: Final = frozenset({0, 2, 3, 4, 8, 9})
_MAX_DEPTH: Final = 12

#: Numbers of the fields to keep of a struct, each with the fields to keep of the structs inside it. Integers and
#: booleans are always kept, other fields skipped.
_Wanted: TypeAlias = Mapping[int, "_Wanted"]
_NONE: Final[_Wanted] = {}
_ELEMENT: Final[_Wanted] = {4: _NONE}
_FOOTER: Final[_Wanted] = {2: _NONE, 4: {1: {3: {3: _NONE, 12: {5: _NONE, 6: _NONE}}}}}
_PAGE: Final[_Wanted] = {5: _NONE, 7: _NONE}


class Chunk(NamedTuple):
    """A leaf column of one row group, under the name of its top-level column.

    ``start`` and ``end`` are byte offsets in the file. ``bounds`` are the smallest and largest value; None unless they
    are stated, 64-bit integers without nulls.
    """

    name: str
    values: int
    start: int
    end: int
    bounds: tuple[int, int] | None


class RowGroup(NamedTuple):
    """A row group: its number of rows, of values in all columns (those inside lists counted), and its columns."""

    rows: int
    values: int
    chunks: list[Chunk]


def read_footer(content: bytes) -> list[RowGroup]:
    """The row groups of a Parquet file.

    Raises:
        ValueError: ``content`` is no Parquet file, or its footer contradicts itself or claims more than the limits.
    """
    if len(content) < 12 or content[:4] != _MAGIC or content[-4:] != _MAGIC:
        raise ValueError("it is not a whole Parquet file")
    (length,) = struct.unpack_from("<I", content, len(content) - 8)
    at = len(content) - 8 - length
    if at < 4 or length > MAX_FOOTER_BYTES:
        raise ValueError("its footer lies outside the file, or is larger than any")
    try:
        leaves, end = _schema(content, at)
        footer, end = _struct(content, end, _FOOTER, number=2)
        if 2 in footer:
            raise ValueError("it states its schema twice")
        groups = [_row_group(group, leaves, at) for group in footer[4]]
        rows = int(footer[3])
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError("its footer cannot be read") from error
    if end > len(content) - 8 or rows != sum(group.rows for group in groups) or rows > MAX_ROWS:
        raise ValueError(f"its footer claims {rows} rows and contradicts itself, or is larger than any")
    return groups


def check_pages(content: bytes, group: RowGroup, columns: Iterable[str]) -> None:
    """Check the page headers of the top-level columns ``columns`` of one row group.

    Raises:
        ValueError: a page claims more than the limits, or uses a page type or encoding that precdoctor never writes.
    """
    names = set(columns)
    for chunk in group.chunks:
        if chunk.name in names:
            try:
                _check_chunk(content, chunk)
            except (IndexError, KeyError, TypeError) as error:
                raise ValueError(f"a page header of column {chunk.name!r} cannot be read") from error


def _check_chunk(content: bytes, chunk: Chunk) -> None:
    name = chunk.name
    at = chunk.start
    values = unpacked = 0
    while at < chunk.end:
        header, at = _struct(content, at, _PAGE)
        size, packed = header[2], header[3]
        unpacked += size
        if not 0 <= size <= MAX_PAGE_BYTES or packed < 0 or unpacked > MAX_CHUNK_BYTES:
            raise ValueError(f"a page of column {name!r} claims to unpack to {unpacked} bytes")
        if header[1] not in {_DATA_PAGE, _DICTIONARY_PAGE} or 4 not in header:
            raise ValueError(f"column {name!r} has a page without a checksum, or of a kind precdoctor does not write")
        inner = header[5 if header[1] == _DATA_PAGE else 7]
        if not 0 <= inner[1] <= MAX_CHUNK_VALUES or inner[2] not in _ENCODINGS:
            raise ValueError(f"a page of column {name!r} holds {inner[1]} values in encoding {inner[2]}")
        values += inner[1] if header[1] == _DATA_PAGE else 0
        at += packed
    if at != chunk.end or values != chunk.values:
        raise ValueError(f"column {name!r} claims {chunk.values} values and its pages {values}")


# --- the footer ------------------------------------------------------------------------------------------------------


#: Cache of :func:`_schema`: the bytes of a footer up to the end of its schema, and the leaf columns. A run has few.
_schemas: Final[list[tuple[bytes, list[tuple[bytes, ...]]]]] = []
_MOST_SCHEMAS: Final = 16


def _schema(data: bytes, at: int) -> tuple[list[tuple[bytes, ...]], int]:
    """``(paths of the leaf columns, end)`` of the version and the schema, with which a footer starts."""
    for start, leaves in _schemas:
        if data.startswith(start, at):
            return leaves, at + len(start)
    end = _varint(data, at + 1)[1]
    if data[at] != 0x15 or data[end] != 0x19:
        raise ValueError("its footer does not start with a version and a schema")
    elements, end = _value(data, end + 1, 9, _ELEMENT, 0)
    leaves = _leaves(elements)
    if len(_schemas) < _MOST_SCHEMAS:
        _schemas.append((data[at:end], leaves))
    return leaves, end


def _leaves(elements: list[dict[int, Any]]) -> list[tuple[bytes, ...]]:
    """The paths of the leaf columns, from the elements of the schema, which are listed depth first, root first."""
    leaves: list[tuple[bytes, ...]] = []
    at = 1

    def walk(children: int, path: tuple[bytes, ...]) -> None:
        nonlocal at
        if len(path) > _MAX_DEPTH:
            raise ValueError("its schema is nested too deeply")
        for _ in range(children):
            element = elements[at]
            at += 1
            here = (*path, element[4])
            if 5 in element:
                walk(element[5], here)
            else:
                leaves.append(here)

    walk(elements[0][5], ())
    if at != len(elements):
        raise ValueError("its schema contradicts itself")
    return leaves


def _row_group(group: dict[int, Any], leaves: list[tuple[bytes, ...]], limit: int) -> RowGroup:
    chunks = [_chunk(column[3], limit) for column in group[1]]
    if [tuple(column[3][3]) for column in group[1]] != leaves or group[3] < 0:
        raise ValueError("its row groups do not fit its schema")
    values = sum(chunk.values for chunk in chunks)
    if values > MAX_GROUP_VALUES:
        raise ValueError(f"a row group claims {values} values")
    return RowGroup(group[3], values, chunks)


def _chunk(fields: dict[int, Any], limit: int) -> Chunk:
    name = fields[3][0].decode()
    values, start = fields[5], fields[9]
    if 11 in fields and fields[11] < start:
        start = fields[11]
    end = start + fields[7]
    if not 4 <= start <= end <= limit:
        raise ValueError(f"column {name!r} lies outside the file")
    if not 0 <= values <= MAX_CHUNK_VALUES:
        raise ValueError(f"column {name!r} claims {values} values")
    bounds = None
    if 12 in fields:
        stated = fields[12]
        low, high = stated.get(6, b""), stated.get(5, b"")
        if len(low) == len(high) == 8 and fields[1] == 2 and stated.get(3) == 0:  # INT64 without nulls
            bounds = (int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True))
    return Chunk(name, values, start, end, bounds)


# --- Thrift's compact protocol ---------------------------------------------------------------------------------------


def _skippable() -> dict[int, re.Pattern[bytes]]:
    """By Thrift type (9 list, 12 struct): a pattern for lists and structs of integers and for lists of such structs.

    Most fields to skip are of this form, and one match of a pattern is faster than parsing them.
    """
    number = rb"[\x80-\xff]{0,9}[\x00-\x7f]"

    def starts(*kinds: int) -> bytes:
        return b"[" + b"".join(b"\\x%x%x" % (high, kind) for high in range(1, 16) for kind in kinds) + b"]"

    def several(item: bytes, *kinds: int) -> bytes:
        heads = (b"".join(b"\\x%x%x" % (count, kind) for kind in kinds) for count in range(15))
        return b"|".join(b"[%b](?:%b){%d}" % (head, item, count) for count, head in enumerate(heads))

    numbers = several(number, 5, 6)
    fields = b"(?:%b%b|%b(?:%b))*\0" % (starts(5, 6), number, starts(9), numbers)
    return {9: re.compile(b"%b|%b" % (numbers, several(fields, 12)), re.DOTALL), 12: re.compile(fields, re.DOTALL)}


_SKIPPABLE: Final = _skippable()


def _struct(data: bytes, at: int, wanted: _Wanted, depth: int = 0, number: int = 0) -> tuple[dict[int, Any], int]:
    """``(fields by number, end)`` of the struct at ``at``: its integers, its booleans and the ``wanted`` fields.

    ``number`` is the number of the field before ``at``, because fields state the difference to it.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("its structures are nested too deeply")
    fields: dict[int, Any] = {}
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        kind = head & 15
        if kind in {5, 6}:  # most fields
            value = data[at]
            if value < 128:
                at += 1
            else:
                value, at = _varint(data, at)
            fields[number] = (value >> 1) ^ -(value & 1)
        elif kind in {1, 2}:  # the type of a boolean field is its value
            fields[number] = kind == 1
        elif number in wanted:
            fields[number], at = _value(data, at, kind, wanted[number], depth)
        elif kind in _SKIPPABLE and (known := _SKIPPABLE[kind].match(data, at)):
            at = known.end()
        else:
            at = _value(data, at, kind, _NONE, depth)[1]
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, wanted: _Wanted, depth: int) -> tuple[Any, int]:
    if kind in {4, 5, 6}:
        return _zigzag(data, at)
    if kind == 12:
        return _struct(data, at, wanted, depth + 1)
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("a string in it does not end")
        return data[at : at + length], at + length
    if kind in {1, 2, 3}:
        return data[at], at + 1
    if kind == 7:
        if at + 8 > len(data):
            raise ValueError("a number in it does not end")
        return data[at : at + 8], at + 8
    if kind == 9:
        count, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _varint(data, at)
        items = []
        for _ in range(count):  # a huge count ends in an IndexError: every item takes at least a byte
            item, at = _value(data, at, kind, wanted, depth + 1)
            items.append(item)
        return items, at
    raise ValueError(f"it holds a field of type {kind}")


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number in it does not end")
