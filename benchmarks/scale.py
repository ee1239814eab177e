"""Logs of any size, made from a recorded run, and what the commands take to read them.

A step of the made log repeats a sampled step of the recorded one, whose rows get its step and rank; the sampled steps
follow one another as they were recorded, each stretched over its share of the made log.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.survey import COLUMNS
from precdoctor.diagnosis.survey.totals import READ
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


@dataclass(frozen=True)
class Usage:
    """What one command took: seconds of wall and CPU time, and its largest resident set in MB, children included."""

    wall: float
    cpu: float
    memory: int

    def __str__(self) -> str:
        return f"{self.wall:.1f} s ({self.cpu:.1f}, {self.memory} MB)"


def usage_of(command: list[str], folder: Path) -> Usage:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    script = "import resource, subprocess, sys; p = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
    script += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(p.returncode)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(time.monotonic() - began, cpu, int(done.stdout.split()[-1]) // 1024)


_BARE = """
import sys
from pathlib import Path
import pyarrow.parquet as pq
names = sys.argv[2].split(",")
for part in sorted(Path(sys.argv[1]).glob("rank-*/tensors-*.parquet")):
    file = pq.ParquetFile(part)
    have = set(file.schema_arrow.names)
    for _ in file.iter_batches(1 << 14, columns=[n for n in names if n in have], use_threads=False):
        pass
"""


def measure(folder: Path, cases: list[tuple[float, int, int]]) -> str:
    """Make each log, time the commands on it, and remove it again.

    Args:
        folder: for the logs.
        cases: rows, ranks and copies of every module.

    Returns:
        A Markdown table.
    """
    tool = [sys.executable, "-m", "precdoctor"]
    report = str(folder / "report.html")
    one = ["--engine", "local:1"]
    commands: dict[str, Callable[[str], list[str]]] = {
        "bare read, columns of every row": lambda run: [sys.executable, "-c", _BARE, run, ",".join(READ)],
        "bare read, columns of a kept row": lambda run: [sys.executable, "-c", _BARE, run, ",".join(COLUMNS)],
        "diagnose, 1 worker": lambda run: [*tool, "diagnose", run, *one],
        "diagnose again": lambda run: [*tool, "diagnose", run, *one],
        "diagnose, 2 workers": lambda run: [*tool, "diagnose", run, "--engine", "local:2"],
        "diagnose, Dask": lambda run: [*tool, "diagnose", run, "--engine", "dask"],
        "show": lambda run: [*tool, "show", run, *one],
        "report": lambda run: [*tool, "report", run, "-o", report, "--force", *one],
        "whatif": lambda run: [*tool, "whatif", run, "--format", "e4m3", "--kind", "weight"],
        "gate": lambda run: [*tool, "gate", run, "--fail-on", "error", *one],
        "log verify": lambda run: [*tool, "log", "verify", run],
    }
    table: dict[str, list[str]] = {name: [] for name in commands}
    heads = []
    for rows, ranks, copies in cases:
        run = folder / "run"
        written = make(run, int(rows), ranks, copies=copies)
        size = sum(f.stat().st_size for f in run.rglob("*") if f.is_file()) / 1e6
        heads.append(f"{written:,} rows, {plural(ranks, 'rank')}, {size:,.0f} MB")
        for name, command in commands.items():
            if not name.endswith("again"):
                shutil.rmtree(folder / "cache", ignore_errors=True)
            try:
                found = str(usage_of(command(str(run)), folder))
            except subprocess.CalledProcessError as error:
                found = f"status {error.returncode}"
            table[name].append(found)
            print(f"{heads[-1]}: {name}: {found}", file=sys.stderr, flush=True)
        shutil.rmtree(run)
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in table.items())])


_HEAD = """# Logs of any size

`python -m benchmarks.scale measure FOLDER`, on {cores} cores: wall time (CPU time, largest resident set of one process)
of each command, one after the other. Every log repeats the sampled steps of `sample_runs/gpt-bf16-healthy` under other
step numbers, ranks and module names, which compresses better than real logs do. `again` starts from the stored survey.

"""
#: Rows, ranks, copies of every module.
CASES = [(1e5, 1, 1), (1e6, 1, 1), (1e7, 1, 10), (1e8, 1, 40), (1e6, 64, 1), (1e6, 1024, 1)]


def main() -> None:
    """Make a log, or measure the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "measure"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--most", type=float, default=1e8, help="leave out cases with more rows")
    given = parser.parse_args()
    if given.what == "make":
        print(f"{make(given.path, int(given.rows), given.ranks, given.base, given.copies):,} rows")
    else:
        given.path.mkdir(parents=True, exist_ok=True)
        cases = [case for case in CASES if case[0] <= given.most]
        print(_HEAD.format(cores=os.cpu_count()) + measure(given.path, cases))


if __name__ == "__main__":
    main()
