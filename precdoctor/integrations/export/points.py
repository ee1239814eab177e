"""A run as series for dashboards: numbers and histograms by name, step by step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.rows import grouped, known_format
from precdoctor.runlog import Run


@dataclass(frozen=True)
class Choice:
    """A selection of tensors by kind and module; empty means all.

    Attributes:
        kinds: values of the column ``kind``.
        modules: globs of module names.
    """

    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def batches(self, run: Run, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table, for ``tensors`` only the selected ones. ``columns`` must include ``module``."""
        filters = [("kind", "in", list(self.kinds))] if table == "tensors" and self.kinds else None
        for batch in run.batches(table, columns, filters):
            chosen = self._of_modules(batch) if table == "tensors" and self.modules else batch
            if chosen.num_rows:
                yield chosen

    def _of_modules(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        module = batch.column("module")
        names = pc.unique(module).to_pylist()
        wanted = [name for name in names if any(fnmatchcase(name, glob) for glob in self.modules)]
        return batch.filter(pc.is_in(pc.cast(module, pa.string()), pa.array(wanted, pa.string())))


_STEP_COLUMNS = (
    *("step", "rank", "attempt", "optimizer", "wall_time", "loss", "lr", "grad_norm", "loss_scale"),
    *("lost_update_fraction", "non_finite", "skipped"),
)
_TENSOR_COLUMNS = (
    *("step", "rank", "attempt", "root", "module", "kind", "name", "call", "dtype", "numel"),
    *("nan", "pos_inf", "neg_inf", "zero", "subnormal", "amax", "exp_lo", "exp_hist"),
)
#: Formats of at most this many bits are scaled to fill their range, so their headroom says nothing.
_SCALED_BITS = 8


@dataclass
class Point:
    """One step of one process.

    Attributes:
        wall_time: seconds since the epoch, at the end of the step; 0 if it was not recorded.
        scalars: by name, such as ``train/loss`` or ``headroom_binades/output/blocks.0.attn``.
        histograms: by name, ``(exponent of the first bin, counts)``; bin k counts 2^k < abs(x) <= 2^(k+1).
    """

    step: int
    wall_time: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[int, list[int]]] = field(default_factory=dict)


#: Rank and attempt of a recording process.
_Process = tuple[int, int]


def _name(process: _Process) -> str:
    """Return ``rank-00003``; ``rank-00003.1`` for the second attempt."""
    rank, attempt = process
    return f"rank-{rank:05d}" + (f".{attempt}" if attempt else "")


def points(run: Run, choice: Choice) -> Iterator[tuple[str, Iterator[Point]]]:
    """Yield the name of each process and its steps, ascending. Exhaust an inner iterator before the next process."""
    step_rows = (row for batch in run.batches("steps", _STEP_COLUMNS) for row in batch.to_pylist())
    left = grouped(((row["rank"], row["attempt"]), (row["step"], row)) for row in step_rows)
    tensors = itertools.groupby(_tensor_rows(run, choice), key=lambda pair: pair[0])
    for process, rows in tensors:
        mine = sorted(left.pop(process, []), key=lambda pair: pair[0])
        yield _name(process), _points_of(heapq.merge(mine, (row for _, row in rows), key=lambda pair: pair[0]))
    for process, own in sorted(left.items()):
        yield _name(process), _points_of(iter(sorted(own, key=lambda pair: pair[0])))


def _tensor_rows(run: Run, choice: Choice) -> Iterator[tuple[_Process, tuple[int, Mapping[str, Any]]]]:
    for batch in choice.batches(run, "tensors", _TENSOR_COLUMNS):
        for row in batch.to_pylist():
            yield (row["rank"], row["attempt"]), (row["step"], row)


def _points_of(rows: Iterator[tuple[int, Mapping[str, Any]]]) -> Iterator[Point]:
    for step, some in itertools.groupby(rows, key=lambda pair: pair[0]):
        point = Point(step)
        for _, row in some:
            if "kind" in row:
                _add_tensor(point, row)
            else:
                _add_step(point, row)
        yield point


def _add_step(point: Point, row: Mapping[str, Any]) -> None:
    """Add the numbers of a steps row; each of several optimizers (a GAN) gets curves of its own."""
    point.wall_time = row["wall_time"] or point.wall_time
    for name in ("loss", "lr", "grad_norm", "loss_scale", "lost_update_fraction", "non_finite", "skipped"):
        if (value := row[name]) is not None:
            tag = f"train/{name}"
            if tag in point.scalars or (row["optimizer"] and not row["optimizer"].endswith("#0")):
                tag += f"/{row['optimizer']}"
            point.scalars[tag] = float(value)


def _add_tensor(point: Point, row: Mapping[str, Any]) -> None:
    where = "/".join([row["kind"], ".".join(filter(None, (row["module"] or row["root"], row["name"])))])
    if row["call"]:
        where += f"#{row['call'] + 1}"
    bad = row["nan"] + row["pos_inf"] + row["neg_inf"]
    rest = row["numel"] - row["zero"] - bad
    fmt = known_format(row["dtype"])
    values: dict[str, float | None] = {
        "amax": row["amax"],
        "non_finite": bad,
        "zero_share": row["zero"] / row["numel"] if row["numel"] else None,
        "subnormal_share": row["subnormal"] / rest if rest > 0 else None,
        "headroom_binades": fmt.headroom(row["amax"]) if fmt and fmt.bits > _SCALED_BITS and row["amax"] else None,
    }
    for name, value in values.items():
        if value is not None:
            point.scalars[f"{name}/{where}"] = float(value)
    if row["exp_hist"]:
        point.histograms[f"exponents/{where}"] = (row["exp_lo"], row["exp_hist"])
