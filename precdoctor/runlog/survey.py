"""Lists the content of a rank directory: sealed parts, open streams, and the lines of parts.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from precdoctor.errors import CorruptRunError, RunUnreadableError
from precdoctor.runlog.caps import Budget, json_cost
from precdoctor.runlog.files import OPEN_PART, PARTS_FILE, SEALED_PART
from precdoctor.runlog.layout import MAX_JSON_BYTES, files_matching, parse_json, read_regular
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.sealing import Part

_ARROW_ERRORS: Final = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError, KeyError)


@dataclass(frozen=True)
class PartFile:
    """A file that holds rows: a sealed part or an open stream."""

    path: Path
    table: str
    number: int
    sealed: bool

    @property
    def name(self) -> str:
        """The name for messages: ``rank-00000/tensors-000001.parquet``."""
        return "/".join(self.path.parts[-2:])

    def as_sealed(self) -> PartFile:
        """The sealed part of the same table and number."""
        name = f"{self.table}-{self.number:06d}.parquet"
        return PartFile(self.path.with_name(name), self.table, self.number, sealed=True)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn errors of the operating system or Arrow about the file ``name`` into RunUnreadableError."""
    try:
        yield
    except RunUnreadableError:
        raise
    except pa.ArrowException as error:
        raise damaged(name, error) from error
    except OSError as error:
        if error.errno is None:  # Arrow raises an OSError without errno for a damaged file
            raise damaged(name, error) from error
        raise RunUnreadableError(f"cannot read {name}: {error.strerror or error}") from error
    except _ARROW_ERRORS as error:
        raise damaged(name, error) from error


def damaged(name: str, why: object) -> CorruptRunError:
    """The error for a part that cannot be trusted; ``why`` is cut to its first line."""
    line = (str(why).splitlines() or [type(why).__name__])[0].rstrip(".")
    return CorruptRunError(f"{name} is damaged ({line[:200]})")


def read_manifest(directory: Path) -> dict[str, Part]:
    """The parts in parts.jsonl by name; if two lines name one part, the last counts. Empty if there is no file.

    Raises:
        CorruptRunError: a line is damaged. An incomplete last line is ignored: the stream of its part still exists.
        OSError: the file exists but cannot be read.
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
    """The content of a rank directory: ``files``, ordered by table and number, and the lines of parts.jsonl by name."""

    files: list[PartFile]
    listed: dict[str, Part]

    @property
    def missing(self) -> list[str]:
        """Names of parts that parts.jsonl lists and that do not exist."""
        return sorted(set(self.listed) - {file.path.name for file in self.files})

    @property
    def unlisted(self) -> list[str]:
        """Names of sealed parts that parts.jsonl does not list and that have no stream."""
        return [file.path.name for file in self.files if file.sealed and file.path.name not in self.listed]


def survey(directory: Path, cache: PartCache | None = None) -> Survey:
    """List a rank directory, which may be growing.

    A part counts once it is listed; until then its stream does. (Sealing renames, then lists, then unlinks the stream.)
    ``cache`` holds listings and manifests of earlier calls.

    Raises:
        CorruptRunError: parts.jsonl is damaged.
        OSError: the directory or parts.jsonl cannot be read.
    """
    cache = PartCache() if cache is None else cache
    listed = cache.manifest(directory / PARTS_FILE, lambda: read_manifest(directory))
    files = cache.listing(directory, lambda: _part_files(directory))
    content = _survey(files, listed)
    if content.unlisted:  # sealed after parts.jsonl was read: by now the part is listed
        content = _survey(_part_files(directory), read_manifest(directory))
    return content


def _part_files(directory: Path) -> list[PartFile]:
    """The open streams, then the sealed parts. In this order a part sealed meanwhile is found twice, never missed."""
    return [
        PartFile(path, match[1], int(match[2]), sealed)
        for pattern, sealed in ((OPEN_PART, False), (SEALED_PART, True))
        for match, path in files_matching(directory, pattern)
    ]


def _survey(files: list[PartFile], listed: dict[str, Part]) -> Survey:
    chosen: dict[tuple[str, int], PartFile] = {}
    for file in files:
        key = file.table, file.number
        if key not in chosen or file.path.name in listed:
            chosen[key] = file
    return Survey([chosen[key] for key in sorted(chosen)], listed)


def json_lines(content: bytes, where: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; an incomplete last line (no newline) is ignored.

    Raises:
        CorruptRunError: a line is damaged.
        RunTooLargeError: the objects together may take more memory than the cap.
    """
    Budget(where).keep("lines", json_cost(content))
    return [parse_json(line, where) for line in content.split(b"\n")[:-1] if line.strip()]
