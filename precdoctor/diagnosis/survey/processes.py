"""The processes of a run, and the selection of those whose steps and rows are read in full if there are many."""

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

#: Most processes whose steps and rows are read in full.
MOST_PROCESSES = 16
#: Most rows of the ``steps`` table to keep, over all selected processes.
MOST_STEP_ROWS = 1 << 18
#: Processes selected for each reason to stand out; the rest are spread evenly over the ranks.
_EACH = 2
_COLUMNS = ("loss", "grad_norm", "loss_scale", "non_finite", "skipped")


@dataclass(frozen=True, order=True)
class Process:
    """One training process: a global rank, and how often that rank was restarted before (``attempt``)."""

    rank: int
    attempt: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Process:
        """Return the process of a row or event; a missing rank or attempt is 0."""
        return cls(int(record.get("rank") or 0), int(record.get("attempt") or 0))


@dataclass(frozen=True)
class Glance:
    """A summary of the steps of one process.

    Attributes:
        first_bad: first step that was not skipped and has a non-finite loss or tensor; infinity without one.
        last: last step; -1 without steps.
        grad_norm: largest finite norm of the gradient; NaN without one.
        loss_scale: smallest loss scale; NaN without one.
        loss: mean loss over the rows of the last step; NaN without one.
    """

    process: Process
    first_bad: float
    last: float
    grad_norm: float
    loss_scale: float
    loss: float


def glance(piece: Piece, cache: PartCache | None = None) -> Glance | RunUnreadableError:
    """Summarise the steps of one process; returns the error if its log cannot be read."""
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
    """Return how many processes to read in full: at least one. ``rows``: of the ``steps`` table, of all processes."""
    return max(1, min(MOST_PROCESSES, processes, processes * MOST_STEP_ROWS // max(rows, 1)))


def representatives(glances: Sequence[Glance], most: int = MOST_PROCESSES) -> tuple[Process, ...]:
    """Select at most ``most`` processes to read in full; the order of ``glances`` does not matter.

    The first one, then those that went non-finite first, ended first, have the largest gradient, the smallest loss
    scale or a loss furthest from the median, then others spread evenly over the ranks. If ``most`` is too small for
    these, each reason in this order contributes one process before any contributes two; a single one is the first to go
    non-finite, if any did.
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
    outliers: list[list[Process]] = []
    for reason in reasons:
        ranked = sorted((g for g in ordered if not math.isnan(reason(g))), key=lambda g: (reason(g), g.process))
        apart = bool(ranked) and reason(ranked[0]) < reason(ranked[-1])
        outliers.append([g.process for g in ranked[:_EACH]] if apart else [])
    wanted = [ordered[0].process, *(own[i] for i in range(_EACH) for own in outliers if i < len(own))]
    chosen = set(list(dict.fromkeys(wanted))[:most]) if most > 1 else {*outliers[0][:1]}
    others = [g.process for g in ordered if g.process not in chosen]
    room = most - len(chosen)
    chosen.update(others[i * len(others) // room] for i in range(room))
    return tuple(sorted(chosen))
