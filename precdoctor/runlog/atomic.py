"""Writes files atomically: readers see the old content or the new, never half of it. Also encodes JSON documents."""

from __future__ import annotations

import enum
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` so that a reader finds the old file or the new one, never half of one (temp, fsync, rename).

    Raises:
        OSError: the disk is full, or the directory gone or read-only.
    """
    write_atomically(path, dump_json(content))


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """As :func:`write_json_atomically`, for bytes; with ``replace=False`` only the first of several writers succeeds.

    Raises:
        FileExistsError: ``path`` exists, and ``replace`` is False.
        OSError: the disk is full, or the directory gone or read-only.
    """
    temporary = temporary_name(path)
    try:
        _write_new(temporary, content)
        if replace:
            temporary.replace(path)
        else:
            _give_name(temporary, path, content)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _give_name(temporary: Path, path: Path, content: bytes) -> None:
    """Name the file ``path``, which must not exist. Where there are no hard links, it is written a second time."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        _write_new(path, content)


def temporary_name(path: Path) -> Path:
    """A unique name beside ``path``, for a temporary file that readers of the log ignore."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power loss; does nothing on a file system that cannot."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems refuse to sync directories; the file itself is synced
    finally:
        os.close(handle)


def dump_json(content: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON; non-finite numbers become the strings "NaN", "Infinity", "-Infinity"."""
    return json.dumps(jsonable(content), ensure_ascii=True, allow_nan=False, default=str).encode() + b"\n"


def jsonable(value: Any) -> Any:
    """``value`` converted to JSON types: non-finite numbers become the strings "NaN", "Infinity", "-Infinity".

    Dataclasses become objects, enums their values, sets lists, NumPy scalars and arrays plain numbers and lists.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {name: jsonable(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
