"""A request to stop a run that is being recorded: a file in its directory, which every rank on any machine can see."""

from __future__ import annotations

import json
import os
from pathlib import Path

from precdoctor.runlog.files import HALT_FILE

#: A message longer than this is not one of ours.
_MAX_BYTES = 1 << 16


def request_halt(run: Path, message: str) -> None:
    """Ask the processes of a run to stop at their next optimizer step; the first request stands.

    Raises:
        OSError: the run directory is gone, full or read-only.
    """
    path = run / HALT_FILE
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"message": message}) + "\n", encoding="utf-8")
        temporary.replace(path)


def halt_requested(run: Path) -> str | None:
    """The message of a request; None when there is none, or none that can be read."""
    try:
        with (run / HALT_FILE).open("rb") as file:
            request = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    message = request.get("message") if isinstance(request, dict) else None
    return message if isinstance(message, str) else None
