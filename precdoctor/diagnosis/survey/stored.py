"""Surveys of large logs, kept for the next command in the user's own cache: ``~/.cache/precdoctor/surveys``.

A stored survey is named by the checksums of all parts it is of, so it is used for these bytes only, and a log that
changes has another. It does not lie beside the run: a run directory may come from anybody, with a survey in it that
contradicts its rows. What lies in the cache was written by this user; see :func:`_folder`.
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

#: Logs with fewer rows are read again in less than two seconds.
WORTH_STORING = 1 << 20
#: Of what a survey holds: raised whenever that changes.
_VERSION = 1
_MOST_FILES, _MOST_BYTES = 16, 1 << 30
_STEPS = pa.schema([pa.field("kind", pa.string()), pa.field("step", pa.int64())])
_SCHEMAS = (SCHEMA, _STEPS, BAD, BATCHES, ROWS)


def key_of(run: Run, steps: Sequence[int] | None) -> str | None:
    """The name of a survey that keeps ``steps``; None while the run is being written, or is damaged."""
    found = run.seals()
    if found is None:
        return None
    what = json.dumps([_VERSION, steps, found], sort_keys=True)
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


def load(key: str) -> Survey | None:
    """The survey of this name; None where there is none, or it cannot be read."""
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
    """Keep a survey; where that is not possible, nothing is kept."""
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
    """The cache, if it is a directory of this user into which nobody else can write."""
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
    """Remove what was used longest ago, beyond the limits on number and size."""
    with contextlib.suppress(OSError):
        files = sorted(((f.stat().st_mtime_ns, f.stat().st_size, f) for f in folder.glob("*.arrows")), reverse=True)
        size = 0
        for number, (_, own, file) in enumerate(files):
            size += own
            if number >= _MOST_FILES or size > _MOST_BYTES:
                file.unlink()
