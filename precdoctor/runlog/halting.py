"""Requests to stop a running run: a file in the run directory, visible to every rank on every machine."""

from __future__ import annotations

import json
from pathlib import Path

from precdoctor.runlog.atomic import write_json_atomically
from precdoctor.runlog.files import HALT_FILE

#: Bytes to read at most; a longer file is not from :func:`request_halt`.
_MAX_BYTES = 1 << 16


def request_halt(run: Path, message: str) -> None:
    """Ask the processes of a run to stop at their next optimizer step. If a request exists already, it is kept.

    Raises:
        OSError: the run directory is gone, full or read-only.
    """
    path = run / HALT_FILE
    if not path.exists():
        write_json_atomically(path, {"message": message})


def halt_requested(run: Path) -> str | None:
    """The message of the request; None if there is no readable request."""
    try:
        with (run / HALT_FILE).open("rb") as file:
            request = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    message = request.get("message") if isinstance(request, dict) else None
    return message if isinstance(message, str) else None
