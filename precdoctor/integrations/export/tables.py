"""Export to one CSV or Parquet file per table."""

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
    """Write ``tensors.parquet``, ``steps.parquet``, ``events.parquet``, and ``ops.parquet`` if ops were listed.

    The files hold all ranks, with names as plain strings. Returns their paths.

    Raises:
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    files = []
    for table in _tables(run):
        schema = _plain(table_schema(table))
        path = folder / f"{table}.parquet"
        with _removed_if_unfinished(path), pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for group in _groups(choice.batches(run, table), schema):
                writer.write_table(group)
        files.append(path)
    return files


def to_csv(run: Run, folder: Path, choice: Choice) -> list[Path]:
    """Write ``tensors.csv``, ``steps.csv``, ``events.csv``, and ``ops.csv`` if ops were listed; return their paths.

    Lists are JSON, nulls are empty, and an apostrophe precedes text that a spreadsheet would take for a formula.

    Raises:
        RunUnreadableError: a part of the log is damaged.
        OSError: the folder cannot be written.
    """
    files = []
    for table in _tables(run):
        schema = _plain(table_schema(table))
        flat = pa.schema([pa.field(f.name, pa.string() if pa.types.is_list(f.type) else f.type) for f in schema])
        path = folder / f"{table}.csv"
        with _removed_if_unfinished(path), pa.csv.CSVWriter(str(path), flat) as writer:
            for batch in choice.batches(run, table):
                writer.write_batch(_flat(batch, flat))
        files.append(path)
    return files


@contextlib.contextmanager
def _removed_if_unfinished(path: Path) -> Iterator[None]:
    """Remove a file that could not be finished (a full disk, Ctrl-C), so that nobody takes it for complete."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _tables(run: Run) -> list[str]:
    return [table for table in TABLES if table != "ops" or next(run.batches(table, ["step"]), None) is not None]


def _plain(schema: pa.Schema) -> pa.Schema:
    """Replace dictionary columns, which only save space, by plain ones, which every tool reads."""
    return pa.schema(
        [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type, f.nullable) for f in schema]
    )


def _groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Collect batches into tables of at least ``_GROUP`` rows, except the last."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= _GROUP:
            yield pa.Table.from_batches(held).cast(schema)
            held = []
    if held:
        yield pa.Table.from_batches(held).cast(schema)


def _flat(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch for CSV: lists to JSON, formulas escaped."""
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
