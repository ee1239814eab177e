"""Creates and finds run directories, and reads their JSON files without trusting them.

Every path is built from a fixed name or matches a fixed pattern; no path is ever taken from the content of a file.
Links below the run directory are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from precdoctor._version import __version__
from precdoctor.errors import (
    CorruptRunError,
    NewerSchemaError,
    RunExistsError,
    RunNotFoundError,
    RunUnreadableError,
    UsageError,
    likely,
)
from precdoctor.runlog.atomic import dump_json, write_atomically, write_json_atomically
from precdoctor.runlog.caps import Budget, json_cost
from precdoctor.runlog.documents import RUN, Shape, check
from precdoctor.runlog.files import (
    ATTACH_FILE,
    AUTOPSY_DIR,
    HALT_FILE,
    OPEN_PART,
    RANK_DIR,
    RUN_FILE,
    SCHEMA_VERSION,
    TEMPORARY,
)

#: Where ``record`` puts a run when no ``-o`` is given.
DEFAULT_BASE: Final = Path("precdoctor-runs")
#: The module tree of a model with 100 000 parameters takes about 30 MB.
MAX_JSON_BYTES: Final = 64 << 20

#: A document of the run directory whose writer was killed before it could give it its name.
_UNNAMED: Final = re.compile(rf"\.(?:{re.escape(RUN_FILE)}|{re.escape(HALT_FILE)})\..+\.tmp")
_RECORD_HINT = "record one with: precdoctor record -- python train.py"


@dataclass(frozen=True)
class RankDirectory:
    """One process's directory: ``rank-NNNNN`` is attempt 0, ``rank-NNNNN.1`` attempt 1."""

    rank: int
    attempt: int
    path: Path


def create_run(path: Path, info: Mapping[str, Any], *, force: bool = False, shared: bool = False) -> None:
    """Make the run directory and write its ``run.json``: ``info`` plus ``schema_version`` and ``tool``.

    An existing empty directory is used as it is. With ``force`` an existing *run directory* is removed first: one that
    holds a run.json of precdoctor and nothing foreign, is no link, and is not being recorded at this moment. A new
    directory gets mode 0700, because a log holds paths, source lines and arguments; with ``shared`` it gets the mode
    that the umask allows.

    Raises:
        RunExistsError: the path exists, and ``force`` was not given or does not permit its removal.
        UsageError: the directory cannot be made or written.
    """
    path = Path(path)
    content = {**info, "schema_version": SCHEMA_VERSION, "tool": {"name": "precdoctor", "version": __version__}}
    try:
        if os.path.lexists(path):
            _make_room(path, force=force)
        path.mkdir(mode=0o777 if shared else 0o700, parents=True, exist_ok=True)
        if not (content.get("options") or {}).get("redact_names"):
            content["place"] = _place(path)
        # Of two launches that found the same empty directory, only one gets it.
        write_atomically(path / RUN_FILE, dump_json(content), replace=False)
    except FileExistsError:
        raise RunExistsError(f"{path} is being used by another run; give another directory with -o") from None
    except OSError as error:
        raise UsageError(f"cannot create the run directory {path}: {error.strerror or error}") from error


def launched_here(run: Path, info: Mapping[str, Any]) -> bool:
    """Return whether this user launched the run on this host, in this very directory.

    False for a copy or an unpacked archive: its inode number differs, and its run.json may come from anybody.
    """
    try:
        return info.get("place") == _place(run)
    except OSError:
        return False


def _place(run: Path) -> dict[str, Any]:
    status = run.stat()
    return {"host": platform.node(), "user": os.geteuid(), "inode": status.st_ino, "device": status.st_dev}


def add_run_facts(run: Path, facts: Mapping[str, Any]) -> None:
    """Add ``facts`` to run.json. Its modification time stays that of the launch, because runs are ordered by it.

    Raises:
        CorruptRunError: run.json is damaged.
        OSError: the directory is gone, full or read-only.
    """
    file = run / RUN_FILE
    launched = file.lstat()
    write_json_atomically(file, {**read_json(file), **facts})
    os.utime(file, ns=(launched.st_atime_ns, launched.st_mtime_ns))


def _make_room(path: Path, *, force: bool) -> None:
    """Remove the run directory at ``path`` if ``force`` permits it.

    A directory stays if it is empty, or holds only what launches left that were killed before they had named run.json.

    Raises:
        RunExistsError: ``path`` is not a directory, is being recorded, or holds anything that must not be removed.
    """
    from precdoctor.runlog.lock import is_locked

    if path.is_symlink() or not path.is_dir():
        raise RunExistsError(f"{path} exists and is not a directory of its own; give another one with -o")
    entries = sorted(entry.name for entry in path.iterdir() if not _UNNAMED.fullmatch(entry.name))
    if not entries:
        return
    if not force:
        raise RunExistsError(
            f"{path} already exists; give another directory with -o, or replace it with --force (in Python: force=True)"
        )
    own = {RUN_FILE, ATTACH_FILE, HALT_FILE} | ({AUTOPSY_DIR} if _is_ours(path / AUTOPSY_DIR / RUN_FILE) else set())
    foreign = [name for name in entries if name not in own and not RANK_DIR.fullmatch(name)]
    if RUN_FILE not in entries or not _is_ours(path / RUN_FILE):
        raise RunExistsError(f"{path} is not a precdoctor run, so --force does not remove it; give another -o")
    if foreign:
        raise RunExistsError(f"{path} also holds {foreign[0]!r}, so --force does not remove it; move that file away")
    if any(is_locked(rank.path) for rank in rank_directories(path)):
        raise RunExistsError(f"{path} is being recorded at this moment; give another directory with -o")
    shutil.rmtree(path)  # does not follow links


def _is_ours(run_file: Path) -> bool:
    try:
        info = read_json(run_file)
    except (OSError, RunUnreadableError):
        return False
    tool = info.get("tool")
    return isinstance(tool, dict) and tool.get("name") == "precdoctor" and "schema_version" in info


def create_rank_directory(run: Path, rank: int) -> Path:
    """Make this process's own directory: ``rank-00003``, or ``rank-00003.1`` if an earlier process had rank 3.

    Raises:
        OSError: the run directory is gone, full or read-only.
        ValueError: ``rank`` is not in [0, 99999].
    """
    if not 0 <= rank < 100_000:
        raise ValueError(f"a rank is a number from 0 to 99999, got {rank}")
    for attempt in range(10_000):
        path = Path(run) / (f"rank-{rank:05d}" + (f".{attempt}" if attempt else ""))
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"rank {rank} was started 10000 times in {run}")


def rank_directories(run: Path) -> list[RankDirectory]:
    """Every rank directory of a run, ordered by rank and attempt. Links and files are ignored.

    Raises:
        OSError: the run directory cannot be listed.
    """
    directories = []
    with os.scandir(run) as entries:
        for entry in entries:
            match = RANK_DIR.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                directories.append(RankDirectory(int(match[1]), int(match[2] or 0), Path(entry.path)))
    return sorted(directories, key=lambda d: (d.rank, d.attempt, d.path.name))


def files_matching(directory: Path, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Path]]:
    """The regular files of a directory whose whole name matches ``pattern``, in the order of their names.

    Raises:
        OSError: the directory cannot be listed.
    """
    with os.scandir(directory) as entries:
        matches = [
            (match, Path(entry.path))
            for entry in entries
            if (match := pattern.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        ]
    return iter(sorted(matches, key=lambda pair: pair[1].name))


def left_open(rank: RankDirectory) -> bool:
    """Return whether the directory holds open streams or temporary files, which
    :func:`precdoctor.runlog.sealing.seal` would seal or remove.

    Raises:
        OSError: the directory cannot be listed.
    """
    return any(True for pattern in (OPEN_PART, TEMPORARY) for _ in files_matching(rank.path, pattern))


def newest_run(base: Path = DEFAULT_BASE) -> Path:
    """The run directory below ``base`` that was launched last.

    Raises:
        RunNotFoundError: ``base`` holds no run directory.
    """
    runs = _runs_in(Path(base))
    if not runs:
        raise RunNotFoundError(f"there is no run below {base}/; name a run directory, or {_RECORD_HINT}")
    return max(runs)[2]


def read_run_info(run: Path) -> dict[str, Any]:
    """The content of ``run.json``, after checking that this is a run directory that this version can read.

    Raises:
        RunNotFoundError: ``run`` does not exist, is not a directory, or is not a run directory.
        NewerSchemaError: a newer precdoctor wrote it.
        CorruptRunError: run.json is damaged.
        RunUnreadableError: the operating system refuses to read run.json, or to look for it.
    """
    try:
        if not run.exists():
            raise RunNotFoundError(f"there is no run directory {run}; {_run_meant(run) or _RECORD_HINT}")
        if not run.is_dir():
            raise RunNotFoundError(f"{run} is a file, not a run directory; name the directory that holds {RUN_FILE}")
        if not _is_regular(run / RUN_FILE) and os.access(run, os.X_OK):  # else the file may be there, out of reach
            inside = _runs_in(run)
            hint = f"name a run in it, such as {max(inside)[2]}" if inside else _RECORD_HINT
            if RANK_DIR.fullmatch(run.name) and _is_regular(run.parent / RUN_FILE):
                hint = f"name the run itself: {run.parent}"
            raise RunNotFoundError(f"{run} is not a run directory: it holds no {RUN_FILE}; {hint}")
        info = read_json(run / RUN_FILE)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RunNotFoundError(f"there is no run directory of such a long name; {_RECORD_HINT}") from error
        raise RunUnreadableError(f"cannot read {run / RUN_FILE}: {error.strerror or error}") from error
    version = info.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptRunError(f"{run / RUN_FILE} states no valid schema_version: it is damaged, or not of precdoctor")
    refuse_newer(version, run)
    _check_shape(info, RUN, run / RUN_FILE)
    return info


def refuse_newer(version: int, written: Path) -> None:
    """Refuse a log schema that this version cannot read; ``written``: the run, or the directory of one process.

    Raises:
        NewerSchemaError: a newer precdoctor wrote it.
    """
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{written} was written by a newer precdoctor (log schema {version}, this one reads up to "
            f"{SCHEMA_VERSION}); read it with that version or a newer one"
        )


def _run_meant(run: Path) -> str:
    """The hint ``did you mean runs/a?`` if a run beside ``run`` or in ``DEFAULT_BASE`` has a similar name; else ""."""
    for base in dict.fromkeys((run.parent, DEFAULT_BASE)):
        if (name := likely(run.name, [child.name for *_, child in _runs_in(base)])) is not None:
            return f"did you mean {base / name}?"
    return ""


def _runs_in(base: Path) -> list[tuple[int, str, Path]]:
    """``(time of launch in ns, name, path)`` of every run directory in ``base``; empty if ``base`` cannot be read."""
    try:
        return [
            ((child / RUN_FILE).lstat().st_mtime_ns, child.name, child)
            for child in base.iterdir()
            if child.is_dir() and _is_regular(child / RUN_FILE)
        ]
    except OSError:
        return []


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def bytes_in(directories: Iterable[Path]) -> int:
    """The size of all regular files in some directories; one that is sealed or removed meanwhile counts as nothing."""
    size = 0
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            for path in directory.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def read_regular(path: Path, limit: int) -> bytes:
    """The content of one regular file of at most ``limit`` bytes.

    Raises:
        CorruptRunError: it is a link, a pipe, a device or a directory, or is larger than ``limit``.
        OSError: it is absent or cannot be read.
    """
    if not _is_regular(path):
        path.lstat()  # raises FileNotFoundError if the path is absent
        raise CorruptRunError(f"{path} is not a regular file; nothing precdoctor writes is a link or a device")
    # The file may have been replaced since the check. O_NOFOLLOW refuses a link, O_NONBLOCK does not hang on a pipe.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptRunError(f"{path} has {size} bytes; precdoctor writes at most {limit} into such a file")
        return file.read(size)  # not read(limit): Python would allocate that many bytes


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a regular file of at most ``MAX_JSON_BYTES``.

    Raises:
        CorruptRunError: the file is not regular, too large, not JSON, not an object, or nested too deeply.
        RunTooLargeError: its values may take more memory than the cap.
        OSError: the file is absent or cannot be read.
    """
    return parse_json(read_regular(path, MAX_JSON_BYTES), path)


def read_json_if_there(path: Path, shape: Shape) -> dict[str, Any] | None:
    """As :func:`read_json`, and check the document against ``shape``; None if the file does not exist.

    Raises:
        CorruptRunError: as :func:`read_json`, or the document does not have this shape.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    _check_shape(content, shape, path)
    return content


def _check_shape(content: object, shape: Shape, path: Path) -> None:
    try:
        check(content, shape)
    except ValueError as error:
        raise CorruptRunError(f"{path.parent.name}/{path.name} is damaged: {error}") from None


def parse_json(text: bytes, where: Path) -> dict[str, Any]:
    """Parse one JSON object; errors name the file ``where``.

    Raises:
        CorruptRunError: ``text`` is not JSON, not an object, or nested too deeply.
        RunTooLargeError: its values may take more memory than the cap.
    """
    Budget(where).keep("document", json_cost(text))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptRunError(f"{where} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CorruptRunError(f"{where} is damaged: it holds no JSON object")
    return content
