"""Splits a table of a log into pieces that threads, processes or machines can read independently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import CorruptRunError, UsageError
from precdoctor.runlog.filters import Query, query
from precdoctor.runlog.layout import RankDirectory
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.parts import joined, part_rows
from precdoctor.runlog.survey import readable, survey

#: Most rows of a piece, unless a single part has more.
PIECE_ROWS: Final = 1 << 21


@dataclass(frozen=True)
class Piece:
    """The share of a table that one worker reads.

    Attributes:
        directory: the rank directory.
        table: ``tensors``, ``steps``, ``events`` or ``ops``.
        parts: numbers of the first and last part; None means all parts.
        rows: number of rows of the piece according to parts.jsonl; rows of open streams are not counted.
        since: first step to read; None means all steps.
    """

    directory: RankDirectory
    table: str
    parts: tuple[int, int] | None
    rows: int
    since: int | None = None


def checked_engine(engine: str | None) -> str | None:
    """Return ``engine`` unchanged if it is valid: None, ``local[:WORKERS]`` or ``dask[:ADDRESS]``.

    Raises:
        UsageError: there is no such engine.
    """
    kind, _, argument = (engine or "local").partition(":")
    workers = not argument or (argument.isdecimal() and int(argument) > 0)
    if kind not in ("local", "dask") or (kind == "local" and not workers):
        raise UsageError(f"--engine takes local, local:WORKERS, dask or dask:ADDRESS, got {engine!r}")
    return engine


def pieces_of(directory: RankDirectory, table: str, cache: PartCache) -> list[Piece]:
    """The pieces of one process's table, in the order of writing.

    Raises:
        RunUnreadableError: the directory is damaged or cannot be read.
    """
    with readable(directory.path.name):
        content = survey(directory.path, cache)
    whole = Piece(directory, table, None, 0)
    pieces: list[Piece] = []
    for part in content.files:
        if part.table == table:
            listed = content.listed.get(part.as_sealed().path.name)
            rows = 0 if listed is None else listed.rows
            if not pieces or pieces[-1].rows + rows > PIECE_ROWS:
                pieces.append(replace(whole, parts=(part.number, part.number), rows=rows))
            else:
                first = (pieces[-1].parts or (part.number,))[0]
                pieces[-1] = replace(whole, parts=(first, part.number), rows=pieces[-1].rows + rows)
    return pieces if len(pieces) > 1 else [replace(whole, rows=sum(p.rows for p in pieces))]


def piece_rows(
    piece: Piece,
    columns: Sequence[str],
    more: Sequence[str] = (),
    steps: Sequence[int] | None = None,
    cache: PartCache | None = None,
) -> Iterator[pa.RecordBatch]:
    """All rows of a piece, some thousands at a time, always with step, rank and attempt. Each part is read once.

    Args:
        columns: columns to read for every row.
        more: further columns of the row groups that may hold ``steps``; batches of other row groups lack them.
        steps: steps for which ``more`` is read; None means all.

    Raises:
        UsageError: an unknown column.
        RunUnreadableError: a part is damaged or cannot be read.
    """
    wide, rest = _queries(piece.table, tuple(columns), tuple(more), None if steps is None else tuple(steps))
    for batch in joined(rank_rows(piece.directory, wide, cache or PartCache(), rest, piece.parts)):
        if piece.since is not None:
            batch = batch.filter(pc.greater_equal(batch.column("step"), piece.since))  # noqa: PLW2901
        if batch.num_rows:
            yield batch


@lru_cache(maxsize=8)
def _queries(
    table: str, columns: tuple[str, ...], more: tuple[str, ...], steps: tuple[int, ...] | None
) -> tuple[Query, tuple[str, ...]]:
    """``(query of the row groups that may hold steps, columns of the other row groups)``; the same for all pieces."""
    wide = query(table, [*columns, *more], None if steps is None else [("step", "in", list(steps))])
    return wide, () if steps is None else query(table, columns).needed


def rank_rows(
    rank: RankDirectory,
    asked: Query,
    cache: PartCache,
    rest: tuple[str, ...] = (),
    parts: tuple[int, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The columns that ``asked`` needs, plus ``attempt``, of one process; its row filter is not applied yet.

    Args:
        rest: as for :func:`~precdoctor.runlog.parts.sealed_rows`.
        parts: numbers of the first and last part; None means all.

    Raises:
        CorruptRunError: a part is missing or damaged.
        RunUnreadableError: the operating system refuses to read it.
    """
    name = rank.path.name
    with readable(name):
        content = survey(rank.path, cache)
    for missing in content.missing:
        if missing.startswith(f"{asked.table}-"):
            raise CorruptRunError(f"{name}/{missing} is missing")
    for part in content.files:
        if part.table == asked.table and (parts is None or parts[0] <= part.number <= parts[1]):
            yield from part_rows(part, content, asked, rank, cache, rest)
