"""One CSV or Parquet file per table: the whole run for anything that reads tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from precdoctor.integrations.export.points import Choice
from precdoctor.runlog import Run
from precdoctor.runlog.filters import table_schema
from precdoctor.runlog.schema import TABLES

#: Rows per group of a Parquet file.
_GROUP = 1 << 16
#: A spreadsheet takes a cell that begins like this for a formula.
_FORMULA = r"^([=+\-@\t\r])"


def to_parquet(run: Run, folder: Path, choice: Choice) -> list[Path]:
    """``tensors.parquet``, ``steps.parquet`` and ``events.parquet``, of a run with op lists also ``ops.parquet``; all
    ranks, names as plain strings.

    Raises:
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    files = []
    for table in _tables(run):
        schema = _plain(table_schema(table))
        path = folder / f"{table}.parquet"
        with _whole(path), pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for group in _groups(choice.batches(run, table), schema):
                writer.write_table(group)
        files.append(path)
    return files


def to_csv(run: Run, folder: Path, choice: Choice) -> list[Path]:
    """``tensors.csv``, ``steps.csv`` and ``events.csv``; lists as JSON, nulls empty, names that a spreadsheet would
    take for a formula behind an apostrophe.

    Raises:
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    files = []
    for table in _tables(run):
        schema = _plain(table_schema(table))
        flat = pa.schema([pa.field(f.name, pa.string() if pa.types.is_list(f.type) else f.type) for f in schema])
        path = folder / f"{table}.csv"
        with _whole(path), pa.csv.CSVWriter(str(path), flat) as writer:
            for batch in choice.batches(run, table):
                writer.write_batch(_flat(batch, flat))
        files.append(path)
    return files


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """A file that cannot be finished (a full disk, Ctrl-C) is not left there as if it were."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _tables(run: Run) -> list[str]:
    """Those of every run, and ``ops`` where something is in it."""
    return [table for table in TABLES if table != "ops" or next(run.batches(table, ["step"]), None) is not None]


def _plain(schema: pa.Schema) -> pa.Schema:
    """Dictionaries are our way to save space; strings are what everybody reads."""
    return pa.schema(
        [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type, f.nullable) for f in schema]
    )


def _groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= _GROUP:
            yield pa.Table.from_batches(held).cast(schema)
            held = []
    if held:
        yield pa.Table.from_batches(held).cast(schema)


def _flat(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for column, field in zip(batch.columns, schema, strict=True):
        if pa.types.is_list(column.type):
            arrays.append(pa.array([None if v is None else json.dumps(v) for v in column.to_pylist()], pa.string()))
        elif pa.types.is_string(field.type):
            arrays.append(
                pc.replace_substring_regex(pc.cast(column, pa.string()), pattern=_FORMULA, replacement=r"'\1")
            )
        else:
            arrays.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
