"""Reads TOML files from untrusted sources (settings, baselines, prescriptions, allow-lists), and spells TOML values."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
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


def toml_key(name: str) -> str:
    """A key; quoted unless it is a bare one."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_string(name)


def toml_value(value: Any, text: Callable[[object], str] = str) -> str:
    """A table (without entries that are None), a list, a number, or the string that ``text`` makes of anything else."""
    if isinstance(value, Mapping):
        entries = (f"{toml_key(str(k))} = {toml_value(v, text)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(v, text) for v in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, (int, float)) else toml_string(text(value))


def toml_string(value: str) -> str:
    """A basic string: printable characters as they are, others escaped, lone surrogates as ``?``."""
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(c: str) -> str:
    if c < " " or c in '"\\':
        return json.dumps(c)[1:-1]
    if 0xD800 <= ord(c) < 0xE000:
        return "?"
    if c.isprintable():
        return c
    return f"\\u{ord(c):04X}" if ord(c) < 0x10000 else f"\\U{ord(c):08X}"


def _cost(content: bytes) -> int:
    """Upper bound of the memory that parsing takes, in bytes: every dot counts as one of a dotted key."""
    cost = _BYTE * len(content)
    for line in content.split(b"\n"):
        dots = line.count(b".")
        cost += dots * (_PART + _PAIR * dots) + (_TABLE if line.lstrip().startswith(b"[") else 0)
    return cost
