"""Reads a run while it grows: each row once, in the order of writing within its process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from precdoctor.runlog.filters import Query, query
from precdoctor.runlog.layout import RankDirectory, rank_directories
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.parts import part_rows
from precdoctor.runlog.survey import PartFile, Survey, readable, survey

_Part = tuple[str, str, int]


class Follower:
    """The position of a reader in a run that other processes write.

    A part keeps its number and the order of its rows when its stream is sealed, so the position is a count of rows per
    part. A sealed part that was read to its end is not opened again, nor is a stream whose size has not changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows_read: dict[_Part, int] = {}
        self._stream_sizes: dict[_Part, int] = {}
        self._finished: set[_Part] = set()
        self._cache = PartCache()

    def new(self, table: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of ``table`` since the last call, some thousands at a time, with ``columns`` in this order.

        Raises:
            UsageError: an unknown table or column.
            RunUnreadableError: a part is damaged or cannot be read. Rows returned before the error count as read.
        """
        asked = query(table, columns)
        for rank in self._ranks():
            with readable(rank.path.name):
                content = survey(rank.path)
            for part in content.files:
                if part.table == table:
                    yield from self._unread_rows(part, content, asked, rank)

    def skip_old(self, table: str, keep: int = 1) -> None:
        """Skip old rows: mark all parts of ``table`` as read, except the newest ``keep`` parts of each process.

        Raises:
            RunUnreadableError: a directory cannot be read.
        """
        for rank in self._ranks():
            with readable(rank.path.name):
                parts = [part for part in survey(rank.path).files if part.table == table]
            self._finished.update(_key(part) for part in parts[: max(0, len(parts) - keep)])

    def _ranks(self) -> list[RankDirectory]:
        with readable(str(self.path)):
            return rank_directories(self.path)

    def _unread_rows(
        self, part: PartFile, found: Survey, asked: Query, rank: RankDirectory
    ) -> Iterator[pa.RecordBatch]:
        key, size = _key(part), -1
        if key in self._finished:
            return
        if not part.sealed:
            with contextlib.suppress(FileNotFoundError):  # it may have been sealed since the survey
                size = part.path.lstat().st_size
            if self._stream_sizes.get(key) == size:
                return
        line = found.listed.get(part.path.name)
        if line is None or line.rows > self._rows_read.get(key, 0):
            yield from self._count_read(key, map(asked.select, part_rows(part, found, asked, rank, self._cache)))
        self._stream_sizes[key] = size
        if part.sealed:
            self._finished.add(key)

    def _count_read(self, key: _Part, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a part that come after those already returned; advances the count."""
        before, at = self._rows_read.get(key, 0), 0
        for batch in batches:
            rest = batch.slice(max(0, before - at))
            at += batch.num_rows
            if rest.num_rows:
                self._rows_read[key] = at
                yield rest


def _key(part: PartFile) -> _Part:
    return (part.path.parent.name, part.table, part.number)
