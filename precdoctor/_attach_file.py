"""The attach file: which processes were offered recording, and the stages that each one reached, a line per stage.

Imported at every interpreter start below ``precdoctor record``, so it imports only modules that are loaded already.
"""

from __future__ import annotations

import os
import sys

ATTACH_FILE = "attach.jsonl"
#: Bytes; ten thousand interpreters must not fill the disk with notes.
_MAX_NOTES = 1 << 20


def note(run: str, event: str, message: str | None = None) -> None:
    """Add a line to the run's attach file. Never raises.

    Args:
        run: the run directory.
        event: ``boot``, ``torch``, ``model`` (one was called), ``backward``, ``armed`` (the process became a rank with
            a directory), ``left out`` (by ``--ranks``) or ``error``.
        message: for ``error`` the reason; for ``model`` where it was called, if that was inside torch.func; else None.
    """
    said = "null" if message is None else _quoted(message)
    python = sys.executable or ""
    if '"redact_names": true' in os.environ.get("PRECDOCTOR_OPTIONS", ""):
        python = python.rpartition("/")[2]
    line = f'{{"pid": {os.getpid()}, "executable": {_quoted(python)}, "event": "{event}", "message": {said}}}\n'
    try:
        # pathlib would be one more import
        file = os.open(os.path.join(run, ATTACH_FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # noqa: PTH118
        try:
            if os.fstat(file).st_size < _MAX_NOTES:
                os.write(file, line.encode("utf-8", "backslashreplace"))  # one write: lines do not mix
        finally:
            os.close(file)
    except OSError:
        pass  # the run directory may be gone or full, and there is no other place to report it


def _quoted(text: str) -> str:
    """Return a JSON string; importing the json module would take longer than the rest of the start."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
