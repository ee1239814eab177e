"""Logs of any size, made from a recorded run, and what the commands take to read them.

A step of the made log repeats a sampled step of the recorded one, whose rows get its step and rank; the sampled steps
follow one another as they were recorded, each stretched over its share of the made log.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.runlog import open_run
from precdoctor.runlog.layout import create_run
from precdoctor.runlog.reader import Run
from precdoctor.runlog.writer import RankWriter

BASE = Path(__file__).parents[1] / "sample_runs" / "gpt-bf16-healthy" / "run"
#: Rows written at a time.
_CHUNK = 1 << 16


def make(path: Path, rows: int, ranks: int = 1, base: Path = BASE, copies: int = 1) -> int:
    """Write a run directory with about ``rows`` rows of tensors, all ranks together.

    Args:
        path: where; what is there is removed.
        rows: of the ``tensors`` table.
        ranks: processes, each with the same number of rows.
        base: the run to repeat; its first process is taken.
        copies: of every module, under a name of its own each: a model of that many times the size.

    Returns:
        The rows that were written.
    """
    shutil.rmtree(path, ignore_errors=True)
    run = open_run(base)
    info = {k: v for k, v in run.info.items() if k not in ("schema_version", "tool", "place")}
    create_run(path, info)
    first = run.ranks[0]
    tables = [_table(run, name) for name in ("tensors", "steps")]
    per_step = [(_copied(rows, copies), facts) for rows, facts in _first_rows(tables)]
    steps = max(1, rows // ranks // int(np.mean([t.num_rows for t, _ in per_step])))
    written = 0
    for rank in range(ranks):
        directory = path / f"rank-{rank:05d}"
        directory.mkdir(mode=0o700)
        writer = RankWriter(directory, rotate_bytes=48 << 20, rotate_seconds=1e9)
        writer.write_facts({**first.facts, "rank": rank})
        written += _write(writer, per_step, steps, rank)
        writer.close(first.end or {})
    return written


def _table(run: Run, name: str) -> pa.Table:
    table = pa.Table.from_batches(run.batches(name)).unify_dictionaries()
    mine = pc.and_(pc.equal(table["rank"], table["rank"][0]), pc.equal(table["attempt"], table["attempt"][0]))
    decoded = {
        c: table[c].cast(pa.string()) if pa.types.is_dictionary(table[c].type) else table[c]
        for c in table.column_names
        if c != "attempt"
    }
    return pa.table(decoded).filter(mine)


def _copied(rows: pa.Table, copies: int) -> pa.Table:
    at = rows.column_names.index("module")
    module = rows["module"]
    named = [pc.binary_join_element_wise(f"copies.{k}", module, ".") for k in range(1, copies)]
    return pa.concat_tables([rows, *(rows.set_column(at, "module", name) for name in named)]).combine_chunks()


def _first_rows(tables: list[pa.Table]) -> list[tuple[pa.Table, pa.Table]]:
    """Per sampled step its rows of the two tables."""
    tensors, steps = tables
    return [
        (tensors.filter(pc.equal(tensors["step"], step)), steps.filter(pc.equal(steps["step"], step)))
        for step in pc.unique(tensors["step"]).to_pylist()
    ]


def _write(writer: RankWriter, per_step: list[tuple[pa.Table, pa.Table]], steps: int, rank: int) -> int:
    written = at = 0
    while at < steps:
        which = at * len(per_step) // steps
        until = min(steps, -(-(which + 1) * steps // len(per_step)))
        tensors, facts = per_step[which]
        count = min(until - at, max(1, _CHUNK // tensors.num_rows))
        for name, table in (("tensors", tensors), ("steps", facts)):
            many = pa.concat_tables([table] * count).combine_chunks()
            numbers = np.repeat(np.arange(at, at + count, dtype=np.int64), table.num_rows)
            columns = {c: many[c] for c in many.column_names}
            columns |= {"step": pa.array(numbers), "rank": pa.array(np.full(len(numbers), rank, np.int32))}
            writer.append(name, columns, many.num_rows)
        written += tensors.num_rows * count
        at += count
    return written


def main() -> None:
    """Make a log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--copies", type=int, default=1)
    arguments = parser.parse_args()
    print(
        json.dumps(
            {"rows": make(arguments.path, int(arguments.rows), arguments.ranks, arguments.base, arguments.copies)}
        )
    )


if __name__ == "__main__":
    main()
