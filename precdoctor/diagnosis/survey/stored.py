"""Surveys of large logs, stored for the next command in the user's own cache: ``~/.cache/precdoctor/surveys``.

A stored survey is named by a hash of the checksums of all its parts, so a log that changes gets another name. Surveys
are not stored beside the run, because a run directory may come from anybody, with a survey that contradicts its rows.
The cache holds only what this user wrote; see :func:`_folder`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from precdoctor.diagnosis.survey.survey import BAD, BATCHES, ROWS, Survey
from precdoctor.diagnosis.survey.totals import SCHEMA
from precdoctor.runlog.atomic import temporary_name

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

#: Logs with fewer rows are not stored: reading them again takes less than two seconds.
WORTH_STORING = 1 << 20
#: Version of a survey's contents; raise it whenever they change.
_VERSION = 2
_MOST_FILES, _MOST_BYTES = 16, 1 << 30
_STEPS = pa.schema([pa.field("kind", pa.string()), pa.field("step", pa.int64())])
_SCHEMAS = (SCHEMA, _STEPS, BAD, BATCHES, ROWS)


def key_of(run: Run, steps: Sequence[int] | None) -> str | None:
    """Return the name of the run's survey that keeps ``steps``; None if the run is still written, or damaged."""
    found = run.seals()
    if found is None:
        return None
    what = json.dumps([_VERSION, steps, found], sort_keys=True)
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


def load(key: str) -> Survey | None:
    """Return the stored survey of this name; None if there is none, or it cannot be read."""
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{key}.arrows"
    try:
        with pa.memory_map(str(path)) as source:
            tables = [pa.ipc.open_stream(source).read_all() for _ in _SCHEMAS]
            kept = json.loads(tables[-1].schema.metadata[b"kept"])
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
    if any(not t.schema.equals(s) for t, s in zip(tables, _SCHEMAS, strict=True)):
        return None
    totals, steps, bad, batches, rows = (t.replace_schema_metadata(None).combine_chunks() for t in tables)
    kinds, step = np.asarray(steps["kind"].to_pylist(), object), steps["step"].to_numpy()
    batch = rows.to_batches()
    return Survey(
        totals=totals,
        steps_of={str(kind): step[kinds == kind] for kind in dict.fromkeys(kinds.tolist())},
        bad=bad,
        batches=batches,
        rows=batch[0] if batch else pa.RecordBatch.from_pylist([], ROWS),
        kept=None if kept is None else frozenset(kept),
    )


def store(key: str, survey: Survey) -> None:
    """Write a survey to the cache; does nothing if the cache cannot be written."""
    folder = _folder(make=True)
    if folder is None:
        return
    kinds = [kind for kind, steps in survey.steps_of.items() for _ in range(len(steps))]
    steps = np.concatenate([*survey.steps_of.values(), np.zeros(0, np.int64)])
    kept = None if survey.kept is None else sorted(survey.kept)
    rows = pa.Table.from_batches([survey.rows]).replace_schema_metadata({"kept": json.dumps(kept)})
    tables = (survey.totals, pa.table([kinds, steps], schema=_STEPS), survey.bad, survey.batches, rows)
    path = folder / f"{key}.arrows"
    temporary = temporary_name(path)
    try:
        with pa.OSFile(str(temporary), "wb") as sink:
            for table in tables:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
                    writer.write_table(table)
        temporary.replace(path)
    except (OSError, pa.ArrowException):
        with contextlib.suppress(OSError):
            temporary.unlink()
    _thin_out(folder)


def _folder(*, make: bool = False) -> Path | None:
    """Return the cache directory; None unless this user owns it and nobody else can write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "precdoctor" / "surveys"
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (folder, folder.parent):
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
    except (OSError, RuntimeError):
        return None
    return folder


def _thin_out(folder: Path) -> None:
    """Remove the least recently used surveys beyond the limits on number and size."""
    with contextlib.suppress(OSError):
        files = sorted(((f.stat().st_mtime_ns, f.stat().st_size, f) for f in folder.glob("*.arrows")), reverse=True)
        size = 0
        for number, (_, own, file) in enumerate(files):
            size += own
            if number >= _MOST_FILES or size > _MOST_BYTES:
                file.unlink()
