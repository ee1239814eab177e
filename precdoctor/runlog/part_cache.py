"""What an open run keeps of its sealed parts: checksum, footer and pages of a part are checked once.

The survey of a diagnosis reads each part once; what is read later is the evidence of single steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from precdoctor.runlog.sealing import Part

#: A directory that changed less than this before it was listed (ns) may change again without getting a newer time: file
#: systems keep times as coarsely as this.
_SETTLED_NS: Final = 2_000_000_000
_T = TypeVar("_T")

#: Path, time of change in ns, size in bytes: another file has another stamp.
Stamp: TypeAlias = tuple[str, int, int]


def stamp_of(path: Path) -> Stamp:
    """What tells whether a part is still the file it was.

    Raises:
        OSError: it is gone.
    """
    found = path.lstat()
    return (str(path), found.st_mtime_ns, found.st_size)


@dataclass(frozen=True)
class Group:
    """Rows and values of one row group, and their smallest and largest step as far as that is stated."""

    rows: int
    values: int
    steps: tuple[int, int] | None


#: The row groups of a part whose checksum was right, and whose footer and pages claim nothing they must not.
Sound: TypeAlias = tuple[Group, ...]


@dataclass
class PartCache:
    """What is known of the sealed parts, directory listings and manifests of one run."""

    _sound: dict[Stamp, Sound] = field(default_factory=dict)
    _listings: dict[Path, tuple[tuple[int, int], Any]] = field(default_factory=dict)
    _manifests: dict[Path, tuple[Stamp, dict[str, Part]]] = field(default_factory=dict)

    def sound(self, stamp: Stamp) -> Sound | None:
        """The row groups of a part; None before it was found sound."""
        return self._sound.get(stamp)

    def found_sound(self, stamp: Stamp, found: Sound) -> None:
        """Its checksum was right, and it holds these row groups."""
        self._sound[stamp] = found

    def manifest(self, path: Path, read: Callable[[], dict[str, Part]]) -> dict[str, Part]:
        """What ``read`` makes of this parts.jsonl, which grows; read again once it has.

        Raises:
            OSError: as ``read``.
        """
        try:
            stamp = stamp_of(path)
        except FileNotFoundError:
            return read()
        known = self._manifests.get(path)
        if known is None or known[0] != stamp:
            known = self._manifests[path] = (stamp, read())
        return known[1]

    def listing(self, directory: Path, read: Callable[[], _T]) -> _T:
        """What ``read`` makes of the entries of this directory; read again once they have changed.

        Raises:
            OSError: the directory is gone, or as ``read``.
        """
        found = os.lstat(directory)
        stamp = (found.st_ino, found.st_mtime_ns)
        known = self._listings.get(directory)
        if known is not None and known[0] == stamp:
            listed: _T = known[1]
            return listed
        listed = read()
        if stamp[1] < time.time_ns() - _SETTLED_NS:
            self._listings[directory] = (stamp, listed)
        return listed
