"""Which processes were offered recording, and how far each got: a line for each stage that it reached.

Imported at every interpreter start below ``precdoctor record``, so it imports nothing that is not there already.
"""

from __future__ import annotations

import os
import sys

ATTACH_FILE = "attach.jsonl"
#: Ten thousand interpreters should not fill the disk with notes.
_MAX_NOTES = 1 << 20


def note(run: str, event: str, message: str | None = None) -> None:
    """Add a line to the run's attach file. Never raises.

    Args:
        run: the run directory.
        event: ``boot``, ``torch``, ``model`` (one was called), ``backward``, ``armed`` (a rank began: its directory is
            there), ``left out`` (by ``--ranks``) or ``error``.
        message: what went wrong, for ``error``; of ``model`` where it was called, if that was inside torch.func.
    """
    said = "null" if message is None else _quoted(message)
    where = _quoted(sys.executable or "")
    line = f'{{"pid": {os.getpid()}, "executable": {where}, "event": "{event}", "message": {said}}}\n'
    try:
        # pathlib would be one more import
        file = os.open(os.path.join(run, ATTACH_FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # noqa: PTH118
        try:
            if os.fstat(file).st_size < _MAX_NOTES:
                os.write(file, line.encode("utf-8", "backslashreplace"))  # one write: lines of processes do not mix
        finally:
            os.close(file)
    except OSError:
        pass  # the run directory may be gone or full; there is nobody to tell yet


def _quoted(text: str) -> str:
    """A JSON string; the json module takes longer to import than everything else here."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
