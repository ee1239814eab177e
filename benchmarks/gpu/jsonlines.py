"""A file of JSON lines that several processes add to and that survives whatever ends them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(file: Path, line: dict[str, Any]) -> None:
    """Add a line; it is on the disk when this returns."""
    with file.open("a", encoding="utf-8") as to:
        to.write(json.dumps(line) + "\n")
        to.flush()
        os.fsync(to.fileno())


def read(file: Path) -> list[dict[str, Any]]:
    """The lines written so far; one that was cut short is left out."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [found for line in text.splitlines() if (found := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
