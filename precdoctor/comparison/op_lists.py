"""Reads the lists of ops that ``record --ops`` wrote, as objects. Used by ``compare --ops``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.survey.rows import grouped
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.sketch import WIDTH
from precdoctor.runlog.reader import Run

#: Columns to read.
_COLUMNS = (
    *("step", "rank", "attempt", "index", "op", "phase", "root", "module", "file", "line", "code", "settings", "side"),
    *("position", "argument", "name", "producer", "dtype", "shape", "numel", "fingerprint", "nan", "pos_inf"),
    *("neg_inf", "amax", "sum", "sum_sq", "sketch"),
)


@dataclass(frozen=True)
class OpTensor:
    """A tensor that an op read or made.

    Attributes:
        argument: name of the op's argument; None for a result.
        name: name of the weight, if no op of the step has written it.
        producer: index of the op of this step that wrote it last; None if there is none.
        fingerprint: equal for equal bits; None if the memory could not be read.
        bad: numbers of NaN, +Inf and -Inf; None for integers.
        amax: largest magnitude; None for integers and without finite elements.
        norm: L2 norm over the finite elements; None if unknown.
        mean: mean over the finite elements; None if unknown.
        sketch: see :mod:`precdoctor.numerics.sketch`; None if unknown.
    """

    argument: str | None
    name: str | None
    producer: int | None
    dtype: str
    shape: tuple[int, ...]
    numel: int
    fingerprint: int | None
    bad: tuple[int, int, int] | None
    amax: float | None
    norm: float | None
    mean: float | None
    sketch: tuple[float, ...] | None


@dataclass(frozen=True)
class Op:
    """One op of a step: its place in the code, its operands (``reads``, in order) and its results (``makes``)."""

    index: int
    name: str
    phase: str
    root: str
    module: str
    file: str | None
    line: int | None
    code: str | None
    settings: str | None
    reads: tuple[OpTensor, ...]
    makes: tuple[OpTensor, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether this is a call of compiled code, which is listed as one op."""
        return self.name.startswith("compiled.")

    @property
    def source(self) -> str:
        """``path/model.py:42``; empty if the source line is unknown."""
        return f"{self.file}:{self.line}" if self.file is not None else ""


#: Step and rank of a list.
Key = tuple[int, int]


def listed(run: Run) -> list[Key]:
    """Steps and ranks whose ops are in the log, in order.

    Raises:
        NothingRecordedError: the log holds no ops.
        RunUnreadableError: the table is damaged or cannot be read.
    """
    keys: set[Key] = set()
    for batch in run.batches("ops", ["step", "rank"]):
        keys.update(zip(batch.column("step").to_pylist(), batch.column("rank").to_pylist(), strict=True))
    if not keys:
        why = next((e["data"]["why"] for e in RunView(run).events_of("ops") if "why" in e["data"]), None)
        reason = f" ({why})" if why is not None else ""
        raise NothingRecordedError(
            f"{run.origin} holds no list of ops{reason}; record one with: precdoctor record --ops 0 -- python train.py"
        )
    return sorted(keys)


def read_ops(run: Run, key: Key) -> list[Op]:
    """The ops of one step and rank, in the order in which they began; if several attempts have them, of the last.

    Raises:
        RunUnreadableError: the table is damaged or cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for batch in run.batches("ops", _COLUMNS, [("step", "==", key[0]), ("rank", "==", key[1])]):
        rows += batch.to_pylist()
    last = max((row["attempt"] for row in rows), default=0)
    return list(_ops(row for row in rows if row["attempt"] == last))


def _ops(rows: Iterable[dict[str, Any]]) -> Iterator[Op]:
    by_op = grouped((row["index"], row) for row in rows)
    for index in sorted(by_op):
        mine = sorted(by_op[index], key=lambda row: row["position"])
        first = mine[0]
        reads, makes = (tuple(_tensor(row) for row in mine if row["side"] == side) for side in ("in", "out"))
        place = {name: first[name] for name in ("phase", "root", "module", "file", "line", "code", "settings")}
        yield Op(index, first["op"], **place, reads=reads, makes=makes)


def _tensor(row: dict[str, Any]) -> OpTensor:
    bad = (row["nan"], row["pos_inf"], row["neg_inf"])
    finite = row["numel"] - sum(n or 0 for n in bad)
    total, squares, sketch = row["sum"], row["sum_sq"], row["sketch"]
    return OpTensor(
        row["argument"],
        row["name"],
        row["producer"],
        row["dtype"],
        tuple(row["shape"] or ()),
        row["numel"],
        row["fingerprint"],
        None if None in bad else bad,
        row["amax"],
        math.sqrt(max(squares, 0.0)) if squares is not None else None,
        total / finite if total is not None and finite > 0 else None,
        tuple(sketch) if sketch and len(sketch) == WIDTH and None not in sketch else None,
    )
