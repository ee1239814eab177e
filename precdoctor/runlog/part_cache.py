"""Remembers which sealed parts of an open run passed their checks, so that checksum, footer and pages are checked once.

A diagnosis reads each part once for its survey, and again only for the evidence of single steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from precdoctor.runlog.sealing import Part

#: File systems keep times as coarsely as this (ns). A directory that changed more recently before it was listed may
#: change again without a newer time, so its listing is not cached.
_SETTLED_NS: Final = 2_000_000_000
_T = TypeVar("_T")

#: Path, modification time in ns, size in bytes: a file that was replaced or changed gets another stamp.
Stamp: TypeAlias = tuple[str, int, int]


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file, by which a change is noticed.

    Raises:
        OSError: the file is gone.
    """
    status = path.lstat()
    return (str(path), status.st_mtime_ns, status.st_size)


@dataclass(frozen=True)
class Group:
    """Numbers of rows and values of one row group, and its smallest and largest step; None if the footer lacks them."""

    rows: int
    values: int
    steps: tuple[int, int] | None


#: The row groups of a sound part: its checksum is right, its footer and pages stay within the limits.
Sound: TypeAlias = tuple[Group, ...]


@dataclass
class PartCache:
    """Caches the row groups of sound parts, the directory listings and the manifests (parts.jsonl) of one run."""

    groups: dict[Stamp, Sound] = field(default_factory=dict)
    _listings: dict[Path, tuple[tuple[int, int], Any]] = field(default_factory=dict)
    _manifests: dict[Path, tuple[Stamp, dict[str, Part]]] = field(default_factory=dict)

    def manifest(self, path: Path, read: Callable[[], dict[str, Part]]) -> dict[str, Part]:
        """The result of ``read`` for the parts.jsonl at ``path``, cached while the file is unchanged.

        Raises:
            OSError: as ``read``.
        """
        try:
            stamp = stamp_of(path)
        except FileNotFoundError:
            return read()
        cached = self._manifests.get(path)
        if cached is None or cached[0] != stamp:
            cached = self._manifests[path] = (stamp, read())
        return cached[1]

    def listing(self, directory: Path, read: Callable[[], _T]) -> _T:
        """The result of ``read`` for this directory, cached while no entry is added or removed.

        Raises:
            OSError: the directory is gone, or as ``read``.
        """
        status = os.lstat(directory)
        stamp = (status.st_ino, status.st_mtime_ns)
        cached = self._listings.get(directory)
        if cached is not None and cached[0] == stamp:
            listed: _T = cached[1]
            return listed
        listed = read()
        if stamp[1] < time.time_ns() - _SETTLED_NS:
            self._listings[directory] = (stamp, listed)
        return listed
