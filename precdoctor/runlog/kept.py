"""What an open run keeps of its sealed parts, so that a part is not read, checked and decoded anew for every query.

Rules ask a log some thirty times, mostly for columns that were asked for before. A part's checksum is found right once,
its footer is read once, and its columns are, from the second query on, decoded once as long as there is room: memory
stays flat in the size of the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa

from precdoctor.runlog.pages import RowGroup

#: Decoded columns of all parts of a run together; some 60 000 rows with every column but block histograms.
MAX_KEPT_BYTES: Final = 32 << 20
_MAX_FOOTERS: Final = 256

#: Path, time of change in ns, size in bytes: another file has another stamp.
Stamp: TypeAlias = tuple[str, int, int]


def stamp_of(path: Path) -> Stamp:
    """What tells whether a part is still the file it was.

    Raises:
        OSError: it is gone.
    """
    found = path.lstat()
    return (str(path), found.st_mtime_ns, found.st_size)


@dataclass
class Kept:
    """Of one run; the first parts stay, since every query goes through all of them in the same order."""

    max_bytes: int = MAX_KEPT_BYTES
    _footers: dict[Stamp, list[RowGroup] | None] = field(default_factory=dict)
    _columns: dict[Stamp, dict[str, pa.Array]] = field(default_factory=dict)
    _bytes: int = 0

    def is_sound(self, stamp: Stamp) -> bool:
        """Whether the checksum of this part was found right before."""
        return stamp in self._footers

    def footer(self, stamp: Stamp) -> list[RowGroup] | None:
        """Its row groups; None where they are to be read again."""
        return self._footers.get(stamp)

    def found_sound(self, stamp: Stamp, groups: list[RowGroup]) -> None:
        """Its checksum was right, and its footer reads so; footers cost more than a few columns, but have no limit."""
        self._footers[stamp] = groups if len(self._footers) < _MAX_FOOTERS else None

    def columns(self, stamp: Stamp) -> dict[str, pa.Array]:
        """The columns kept of this part: checked, of the reader's types, with all of its rows."""
        return self._columns.get(stamp, {})

    @property
    def has_room(self) -> bool:
        """Whether more columns may be kept."""
        return self._bytes < self.max_bytes

    def keep(self, stamp: Stamp, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """Keep more columns of this part while there is room; all that are known of it now, kept or not."""
        known = self.columns(stamp) | columns
        if self.has_room:
            self._columns[stamp] = known
            self._bytes += sum(array.nbytes for array in columns.values())
        return known
