"""The processes of a run, and which of many are looked at one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.errors import RunTooLargeError, RunUnreadableError
from precdoctor.runlog.part_cache import PartCache
from precdoctor.runlog.pieces import Piece, piece_rows

#: Processes whose steps and rows are kept one by one; of more, those that stand out are chosen.
MOST_PROCESSES = 16
#: Rows of the ``steps`` table that are kept, of all of these together.
MOST_STEP_ROWS = 1 << 18
#: Of those chosen, how many for each reason to stand out; the rest are spread evenly over the ranks.
_EACH = 2
_COLUMNS = ("loss", "grad_norm", "loss_scale", "non_finite", "skipped")


@dataclass(frozen=True, order=True)
class Process:
    """One training process: a global rank, and which of its attempts."""

    rank: int
    attempt: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Process:
        """That of a row or event; 0 for what is missing."""
        return cls(int(record.get("rank") or 0), int(record.get("attempt") or 0))


@dataclass(frozen=True)
class Glance:
    """The steps of one process in a few numbers.

    Attributes:
        first_bad: first step with a non-finite loss or tensor that no loss scaler skipped.
        last: last step.
        grad_norm: largest finite norm of the gradient.
        loss_scale: smallest loss scale.
        loss: loss of the last step.
    """

    process: Process
    first_bad: float
    last: float
    grad_norm: float
    loss_scale: float
    loss: float


def glance(piece: Piece, cache: PartCache | None = None) -> Glance | RunUnreadableError:
    """Read the steps of one process; what is wrong with its log where they cannot be read."""
    process = Process(piece.directory.rank, piece.directory.attempt)
    try:
        batches = [b.select(["step", *_COLUMNS]) for b in piece_rows(piece, _COLUMNS, cache=cache)]
    except RunTooLargeError:
        raise
    except RunUnreadableError as error:
        return error
    if not batches:
        return Glance(process, math.inf, -1.0, math.nan, math.nan, math.nan)
    table = pa.Table.from_batches(batches)
    loss = table["loss"]
    bad = pc.or_kleene(pc.and_(pc.is_valid(loss), pc.invert(pc.is_finite(loss))), pc.greater(table["non_finite"], 0))
    bad = pc.and_not_kleene(bad, pc.fill_null(table["skipped"], False))
    last = _number(pc.max(table["step"]), -1.0)
    norms = table["grad_norm"].filter(pc.is_finite(table["grad_norm"]))
    return Glance(
        process,
        _number(pc.min(table["step"].filter(bad)), math.inf),
        last,
        _number(pc.max(norms), math.nan),
        _number(pc.min(table["loss_scale"]), math.nan),
        _number(pc.mean(loss.filter(pc.equal(table["step"], int(last)))), math.nan),
    )


def _number(value: pa.Scalar, missing: float) -> float:
    found = value.as_py()
    return missing if found is None else float(found)


def most_processes(processes: int, rows: int) -> int:
    """How many of so many processes are looked at one by one, by all their rows of ``steps``; at least one."""
    return max(1, min(MOST_PROCESSES, processes, processes * MOST_STEP_ROWS // max(rows, 1)))


def representatives(glances: Sequence[Glance], most: int = MOST_PROCESSES) -> tuple[Process, ...]:
    """The processes to look at one by one: the same in any order of ``glances``.

    Those that went non-finite first, ended first, have the largest gradient, the smallest loss scale or a loss furthest
    from the median, then others spread evenly over the ranks, the first one included.
    """
    ordered = sorted(glances, key=lambda g: g.process)
    if len(ordered) <= most:
        return tuple(g.process for g in ordered)
    losses = sorted(g.loss for g in ordered if math.isfinite(g.loss))
    middle = losses[len(losses) // 2] if losses else math.nan
    reasons: tuple[Callable[[Glance], float], ...] = (
        lambda g: g.first_bad,
        lambda g: g.last,
        lambda g: -g.grad_norm,
        lambda g: g.loss_scale,
        lambda g: -abs(g.loss - middle),
    )
    chosen = {ordered[0].process}
    for reason in reasons:
        ranked = sorted((g for g in ordered if not math.isnan(reason(g))), key=lambda g: (reason(g), g.process))
        if ranked and reason(ranked[0]) < reason(ranked[-1]):
            chosen.update(g.process for g in ranked[:_EACH])
    others = [g.process for g in ordered if g.process not in chosen]
    room = most - len(chosen)
    chosen.update(others[i * len(others) // room] for i in range(room))
    return tuple(sorted(chosen))
