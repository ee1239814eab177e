"""Makes run directories for tests, through the real writer, from rows that name only the columns that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from precdoctor.runlog.layout import create_rank_directory, create_run
from precdoctor.runlog.schema import TABLES
from precdoctor.runlog.writer import RankWriter

Row = Mapping[str, Any]

#: Values of required columns that a row leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tensors": {
        "step": 0,
        "root": "Net#0",
        "module": "",
        "kind": "output",
        "name": "",
        "call": 0,
        "phase": "train",
        "dtype": "float32",
        "numel": 1,
        "nan": 0,
        "pos_inf": 0,
        "neg_inf": 0,
        "zero": 0,
        "subnormal": 0,
        "at_max": 0,
    },
    "steps": {"step": 0, "optimizer": "SGD#0", "complete": True, "sampled": True},
    "events": {"time_ns": 0, "event": "warning"},
    "ops": {
        "step": 0,
        "index": 0,
        "op": "aten.mul.Tensor",
        "phase": "forward",
        "root": "Net#0",
        "module": "",
        "side": "out",
        "position": 0,
        "dtype": "float32",
        "numel": 1,
    },
}


#: Nobody pulls the plug on a test, and waiting for the disk is half the time of writing a small run.
@mock.patch("os.fsync", new=int)
def write_run(
    path: Path,
    tensors: Sequence[Row] = (),
    steps: Sequence[Row] = (),
    events: Sequence[Row] = (),
    *,
    ops: Sequence[Row] = (),
    facts: Mapping[str, Any] | None = None,
    info: Mapping[str, Any] | None = None,
    ranks: int = 1,
    end: bool | Mapping[str, Any] = True,
    batch_rows: int = 1 << 20,
    **writer_options: Any,
) -> Path:
    """Make a run directory at ``path`` and return it.

    A row without ``rank`` is written to every one of the ``ranks``; with it, only to that one. ``facts`` goes into each
    rank.json, ``info`` into run.json. ``end=False`` leaves the log as a killed process would: open streams, no
    end.json; a mapping becomes the content of end.json. ``batch_rows`` rows go into each append.
    """
    create_run(path, {"command": ["python", "train.py"], **(info or {})})
    rows = {"tensors": tensors, "steps": steps, "events": events, "ops": ops}
    for rank in range(ranks):
        writer = RankWriter(create_rank_directory(path, rank), **writer_options)
        writer.write_facts(facts or {})
        for table, given in rows.items():
            mine = [row for row in given if row.get("rank", rank) == rank]
            columns = columns_of(table, mine, rank)
            for at in range(0, len(mine), batch_rows):
                some = {name: values[at : at + batch_rows] for name, values in columns.items()}
                writer.append(table, some, min(batch_rows, len(mine) - at))
        if end is False:
            writer.abandon()
        else:
            writer.close({} if end is True else end)
    return path


def columns_of(table: str, rows: Sequence[Row], rank: int = 0) -> dict[str, list[Any]]:
    """Rows as columns, required ones filled in; events get ids ``e0``, ``e1`` ..."""
    filled = [{**DEFAULTS[table], "rank": rank, **row} for row in rows]
    if table == "events":
        filled = [{"id": f"e{n}", **row} for n, row in enumerate(filled)]
    named = {name for row in filled for name in row}
    if unknown := named.difference(TABLES[table].names):
        raise KeyError(f"{table} has no column {min(unknown)!r}")
    return {name: [row.get(name) for row in filled] for name in named}
