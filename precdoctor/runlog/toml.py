"""Reads TOML files from untrusted sources: settings, baselines, prescriptions, allow-lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from precdoctor.runlog.caps import Budget

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Bytes of memory that the parser takes, measured: for a byte of text, a line that begins a table, a part of a dotted
#: key, and a pair of parts of one key.
_BYTE, _TABLE, _PART, _PAIR = 40, 1000, 400, 5


def read_toml(file: Path, limit: int) -> dict[str, Any]:
    """The content of a TOML file of at most ``limit`` bytes.

    Raises:
        OSError: the file is absent or cannot be read.
        ValueError: the file is larger, not TOML, or nested too deeply.
        RunTooLargeError: its values may take more memory than the cap.
    """
    with file.open("rb") as stream:
        content = stream.read(limit + 1)  # not by st_size, which is 0 for a device or a pipe
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MiB")
    Budget(file).keep("content", _cost(content))
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _cost(content: bytes) -> int:
    """Upper bound of the memory that parsing takes, in bytes: every dot counts as one of a dotted key."""
    cost = _BYTE * len(content)
    for line in content.split(b"\n"):
        dots = line.count(b".")
        cost += dots * (_PART + _PAIR * dots) + (_TABLE if line.lstrip().startswith(b"[") else 0)
    return cost
