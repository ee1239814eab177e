"""Copies runs from object stores (``s3://bucket/run``) into a temporary directory, to be read there.

Arrow has file systems for ``s3``, ``gs`` and ``file``; others need fsspec. Only the files of a run are copied, and no
link is made.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.fs

from precdoctor.errors import RunNotFoundError, RunTooLargeError, RunUnreadableError, UsageError
from precdoctor.runlog.files import (
    ATTACH_FILE,
    END_FILE,
    HALT_FILE,
    OPEN_PART,
    PARTS_FILE,
    RANK_DIR,
    RANK_FILE,
    RUN_FILE,
    SEALED_PART,
)

#: ``s3://bucket/run``, also with one slash, because ``pathlib.Path`` merges the two.
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.+)")
_OF_RUN: Final = frozenset({RUN_FILE, ATTACH_FILE, HALT_FILE})
_OF_RANK: Final = frozenset({RANK_FILE, END_FILE, PARTS_FILE})
_CHUNK: Final = 8 << 20
#: Bytes that a copy must leave free on the disk.
_SPARE: Final = 1 << 28


def as_url(path: str | os.PathLike[str]) -> str | None:
    """``path`` as a URL; None if it is a path of this machine. For ``file:`` URLs see :func:`local_path`."""
    text = os.fspath(path)
    match = _URL.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    return f"{match[1]}://{match[2].lstrip('/')}"


def without_credentials(url: str) -> str:
    """The URL for reports: without credentials and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def local_path(url: str) -> Path | None:
    """The path of a ``file:`` URL; None for any other."""
    return Path("/" + url.removeprefix("file://")) if url.startswith("file://") else None


def fetch(url: str) -> Path:
    """Copy the run at ``url`` into a temporary directory, which is removed when this process exits.

    Raises:
        RunNotFoundError: there is no run at ``url``.
        UsageError: no file system is known for this kind of URL.
        RunTooLargeError: the run does not fit on the disk.
        RunUnreadableError: the store refuses, or cannot be reached.
    """
    system, root = _system(url)
    try:
        files = list(_files(system, root))
    except FileNotFoundError:
        files = []
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(url, error) from error
    if RUN_FILE not in {str(name) for name, _ in files}:
        raise RunNotFoundError(f"{without_credentials(url)} is not a run directory: it holds no {RUN_FILE}")
    target = Path(tempfile.mkdtemp(prefix="precdoctor-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    need, free = sum(size for _, size in files), shutil.disk_usage(target).free
    if need > free - _SPARE:
        raise RunTooLargeError(
            f"{without_credentials(url)} takes {need:,} bytes and {target.parent} has {free:,} left; set TMPDIR"
        )
    try:
        for name, _ in files:
            _copy(system, f"{root}/{name}", target / name)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(url, error) from error
    return target


def _unreadable(url: str, error: Exception) -> RunUnreadableError:
    return RunUnreadableError(
        f"cannot read {without_credentials(url)}: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
    )


def _system(url: str) -> tuple[pyarrow.fs.FileSystem, str]:
    scheme = url.partition("://")[0]
    try:
        system, root = pyarrow.fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        if scheme in ("s3", "gs", "gcs"):
            raise UsageError(
                f"{without_credentials(url)} cannot be opened: {str(error).splitlines()[0][:200]}"
            ) from None
        try:
            import fsspec

            other, root = fsspec.core.url_to_fs(url)
        except ImportError:
            hint = f"no file system is known for {scheme}://; install fsspec and the package it needs for {scheme}"
            raise UsageError(hint) from None
        except (OSError, ValueError) as wrong:
            raise UsageError(f"{without_credentials(url)} cannot be opened: {wrong}") from None
        system = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(other))
    return system, str(root).rstrip("/")


def _files(system: pyarrow.fs.FileSystem, root: str) -> Iterator[tuple[PurePosixPath, int]]:
    """``(path below root, size in bytes)`` of every file of the run at ``root``; other files are skipped."""
    for info in system.get_file_info(pyarrow.fs.FileSelector(root, recursive=True)):
        if info.type == pyarrow.fs.FileType.File:
            name = PurePosixPath(info.path.removeprefix(root).lstrip("/"))
            *folder, last = name.parts
            own = not folder and last in _OF_RUN
            part = SEALED_PART.fullmatch(last) or OPEN_PART.fullmatch(last) or last in _OF_RANK
            if own or (len(folder) == 1 and RANK_DIR.fullmatch(folder[0]) and part):
                yield name, int(info.size or 0)


def _copy(system: pyarrow.fs.FileSystem, source: str, target: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with system.open_input_stream(source) as stream, target.open("xb") as file:
        while data := stream.read(_CHUNK):
            file.write(data)
