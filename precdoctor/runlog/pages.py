"""Reads the footer and the page headers of a Parquet part before Arrow sees it, to know what it would become.

A file can state anything: two megabytes of zeros and run lengths can unfold into many gigabytes, and a footer that
contradicts itself can end the whole interpreter inside Arrow. What is decoded later is governed by these structs, so
they are what is checked: that they agree with each other, lie inside the file, stay within the limits below, and use
only encodings that cannot grow (those precdoctor writes). They are Thrift structs in the compact protocol, defined in
parquet.thrift of the Parquet format; fields are known here by their numbers there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

#: Largest page when unpacked. The writer means 1 MiB, but with very long strings a page can be a whole row group.
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


@dataclass(frozen=True)
class Chunk:
    """One column of one row group; ``bounds`` are the smallest and largest value when they are stated and integers."""

    path: tuple[str, ...]
    values: int
    start: int
    end: int
    bounds: tuple[int, int] | None


@dataclass(frozen=True)
class RowGroup:
    """Some rows of a part, column by column."""

    rows: int
    chunks: tuple[Chunk, ...]

    @property
    def values(self) -> int:
        """Values of all columns, those inside lists included."""
        return sum(chunk.values for chunk in self.chunks)


def read_footer(content: bytes) -> list[RowGroup]:
    """The row groups of a Parquet file.

    Raises:
        ValueError: it is no Parquet file, its footer contradicts itself, or claims more than the limits above.
    """
    if len(content) < 12 or content[:4] != _MAGIC or content[-4:] != _MAGIC:
        raise ValueError("it is not a whole Parquet file")
    (length,) = struct.unpack_from("<I", content, len(content) - 8)
    at = len(content) - 8 - length
    if at < 4 or length > MAX_FOOTER_BYTES:
        raise ValueError("its footer lies outside the file, or is larger than any")
    try:
        footer, end = _struct(content, at, 0)
        leaves = _leaves(footer[2])
        groups = [_row_group(group, leaves, at) for group in footer[4]]
        rows = int(footer[3])
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
        raise ValueError("its footer cannot be read") from error
    if end > len(content) - 8 or rows != sum(group.rows for group in groups) or rows > MAX_ROWS:
        raise ValueError(f"its footer claims {rows} rows and contradicts itself, or is larger than any")
    return groups


def check_pages(content: bytes, group: RowGroup, columns: Iterable[str]) -> None:
    """Walk the pages of the named top-level columns of one row group.

    Raises:
        ValueError: a page claims more than the limits above, or something precdoctor does not write.
    """
    names = set(columns)
    for chunk in group.chunks:
        if chunk.path[0] in names:
            try:
                _check_chunk(content, chunk)
            except (IndexError, KeyError, TypeError) as error:
                raise ValueError(f"a page header of column {chunk.path[0]!r} cannot be read") from error


def _check_chunk(content: bytes, chunk: Chunk) -> None:
    name = chunk.path[0]
    at = chunk.start
    values = unpacked = 0
    while at < chunk.end:
        header, at = _struct(content, at, 0)
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


def _leaves(elements: list[dict[int, Any]]) -> list[tuple[str, ...]]:
    """The paths of the columns that hold values, from the schema as the footer lists it: depth first, root first."""
    leaves: list[tuple[str, ...]] = []
    at = 1

    def walk(children: int, path: tuple[str, ...]) -> None:
        nonlocal at
        if len(path) > _MAX_DEPTH:
            raise ValueError("its schema is nested too deeply")
        for _ in range(children):
            element = elements[at]
            at += 1
            here = (*path, element[4].decode())
            if 5 in element:
                walk(element[5], here)
            else:
                leaves.append(here)

    walk(elements[0][5], ())
    if at != len(elements):
        raise ValueError("its schema contradicts itself")
    return leaves


def _row_group(group: dict[int, Any], leaves: list[tuple[str, ...]], limit: int) -> RowGroup:
    chunks = tuple(_chunk(column[3], limit) for column in group[1])
    if [chunk.path for chunk in chunks] != leaves or group[3] < 0:
        raise ValueError("its row groups do not fit its schema")
    found = RowGroup(int(group[3]), chunks)
    if found.values > MAX_GROUP_VALUES:
        raise ValueError(f"a row group claims {found.values} values")
    return found


def _chunk(fields: dict[int, Any], limit: int) -> Chunk:
    path = tuple(name.decode() for name in fields[3])
    start = min(fields[9], fields.get(11, fields[9]))
    end = start + fields[7]
    if not 4 <= start <= end <= limit:
        raise ValueError(f"column {path[0]!r} lies outside the file")
    if not 0 <= fields[5] <= MAX_CHUNK_VALUES:
        raise ValueError(f"column {path[0]!r} claims {fields[5]} values")
    stated = fields.get(12, {})
    low, high = stated.get(6, b""), stated.get(5, b"")
    known = len(low) == len(high) == 8 and fields[1] == 2 and stated.get(3) == 0  # INT64 without nulls
    bounds = (int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True))
    return Chunk(path, fields[5], start, end, bounds if known else None)


# --- Thrift's compact protocol ---------------------------------------------------------------------------------------


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """``(fields by number, end)``."""
    if depth > _MAX_DEPTH:
        raise ValueError("its structures are nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        kind = head & 15
        if kind in {5, 6}:  # most fields
            fields[number], at = _zigzag(data, at)
        elif kind in {1, 2}:  # a boolean field is its own type
            fields[number] = kind == 1
        else:
            fields[number], at = _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in {4, 5, 6}:
        return _zigzag(data, at)
    if kind == 12:
        return _struct(data, at, depth + 1)
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
        for _ in range(count):  # ends at the latest where the data does: every item takes a byte
            item, at = _value(data, at, kind, depth + 1)
            items.append(item)
        return items, at
    raise ValueError(f"it holds a field of type {kind}")


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return (value >> 1) ^ -(value & 1), at + 1
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
