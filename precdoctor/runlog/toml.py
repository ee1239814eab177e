"""Reads TOML that somebody else may have written: settings, baselines, prescriptions, allow-lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from precdoctor.runlog.caps import Budget

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Bytes that the parser takes for a byte of text, for a line that begins a table, for a part of a dotted key, and for
#: each pair of parts of one key; measured.
_BYTE, _TABLE, _PART, _PAIR = 40, 1000, 400, 5


def read_toml(file: Path, limit: int) -> dict[str, Any]:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        OSError: it is absent or cannot be read.
        ValueError: it is larger, no TOML, or nested too deeply.
        RunTooLargeError: it unfolds to more than the cap on memory.
    """
    with file.open("rb") as stream:
        content = stream.read(limit + 1)  # the size of a device says nothing
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MiB")
    Budget(file).keep("content", _cost(content))
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _cost(content: bytes) -> int:
    """Bytes that parsing takes in memory, every dot taken for one of a key."""
    cost = _BYTE * len(content)
    for line in content.split(b"\n"):
        dots = line.count(b".")
        cost += dots * (_PART + _PAIR * dots) + (_TABLE if line.lstrip().startswith(b"[") else 0)
    return cost
