"""Aggregates the rows of a run's survey for the charts; memory grows with the number of tensors, not of rows.

Steps are grouped into at most :data:`COLUMNS` columns. A column has the worst value of its steps, never a mean, so that
a spike on a single step survives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.arrow_rows import float_column, int_column
from precdoctor.diagnosis.survey.measures import entries
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.totals import grouped
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, Histograms

#: Most columns of a layer x step chart.
COLUMNS = 120
#: Measures whose largest value is kept for each tensor and column.
MEASURES = ("subnormal", "amax", "non_finite", "masked")
_NAMES = ("root", "module", "kind", "name", "dtype")
_COUNTS = ("numel", "zero", "subnormal", "nan", "pos_inf", "neg_inf")
#: Tensors in formats of at most this many bits have no headroom by design: their scale uses the whole range.
SCALED_BITS = 8
#: Bins of exponent(intended dw) - exponent(w), as recorded.
REL_MIN, REL_MAX = -64, 63
_BINS = EXP_MAX - EXP_MIN + 1


@dataclass(frozen=True)
class TensorId:
    """One tensor of the run, the same on every step and rank."""

    root: str
    module: str
    kind: str
    name: str
    dtype: str
    call: int

    @property
    def layer(self) -> tuple[str, str]:
        """``(root, module)`` of the tensor."""
        return (self.root, self.module)

    @property
    def place(self) -> tuple[str, str, str, str, int]:
        """Its identity in another run, where its dtype may differ."""
        return (self.root, self.module, self.kind, self.name, self.call)


@dataclass(frozen=True)
class Total:
    """A tensor over all steps and ranks: counts summed, amax the largest, scale removed.

    Attributes:
        rows: number of its rows.
        left_out: rows whose scale is no power of two; they are not in the other figures.
        scale: the scale of all rows; None if it changed.
    """

    rows: int
    left_out: int
    scale: float | None
    numel: int
    zero: int
    subnormal: int
    non_finite: int
    histogram: ExponentHistogram
    amax: float | None
    amin_nonzero: float | None


class Survey:
    """The rows of a run's survey, aggregated by tensor and column.

    Attributes:
        edges: first step of each column.
        last_step: last step of the last column.
        drawn_steps: number of steps with rows here.
        rows: number of rows of the whole log.
        tensors: the tensors; their indices are used everywhere.
    """

    def __init__(self, view: RunView) -> None:
        steps = view.kept_steps or (int(view.steps["step"].min()),)
        per_column = math.ceil(len(steps) / COLUMNS)
        self.edges: Ints = np.asarray(steps[::per_column], dtype=np.int64)
        self.last_step = steps[-1]
        self.drawn_steps = len(steps)
        self.rows = int(pc.sum(view.survey.totals["rows"]).as_py() or 0)
        self.tensors: list[TensorId] = []
        self._first_order: dict[int, int] = {}
        batch = view.survey.rows
        which = self._identify(batch)
        count, width = len(self.tensors), len(self.edges)
        bins = _BINS + REL_MAX - REL_MIN + 1
        view.run.budget.keep("charts", 8 * count * (len(MEASURES) * width + bins + len(_COUNTS) + 8))
        self._cells = {name: np.full((count, width), np.nan) for name in MEASURES}
        self._histograms: Ints = np.zeros((count, _BINS), dtype=np.int64)
        self._sums: Floats = np.zeros((count, len(_COUNTS) + 2))
        self._relative: Ints = np.zeros((count, REL_MAX - REL_MIN + 1), dtype=np.int64)
        self._updates: Floats = np.zeros((count, 2))
        self._scales: Floats = np.full((count, 2), np.nan)
        self._extremes: Floats = np.full((count, 2), np.nan)
        self._add(batch, which)

    def cells(self, measure: str) -> Floats:
        """The values of a measure of :data:`MEASURES`, shape ``(tensors, columns)``; NaN without a recorded value."""
        return self._cells[measure]

    def order(self, tensor: int) -> int | None:
        """Place of a tensor in the execution order of its first step; None if unknown."""
        return self._first_order.get(tensor)

    def total(self, tensor: int) -> Total:
        """The totals of one tensor."""
        *counts, rows, left_out = self._sums[tensor]
        numel, zero, subnormal, nan, pos_inf, neg_inf = (int(c) for c in counts)
        low, high = self._scales[tensor]
        histogram = ExponentHistogram(EXP_MIN, self._histograms[tensor]).trimmed()
        amax, amin = (None if math.isnan(v) else float(v) for v in self._extremes[tensor])
        return Total(
            rows=int(rows),
            left_out=int(left_out),
            scale=float(low) if low == high else None,
            numel=numel,
            zero=zero,
            subnormal=subnormal,
            non_finite=nan + pos_inf + neg_inf,
            histogram=histogram,
            amax=amax if histogram.total else None,
            amin_nonzero=amin if histogram.total else None,
        )

    def updates(self, tensor: int) -> tuple[int, int, ExponentHistogram]:
        """``(lost updates, intended updates, histogram of exponent(intended dw) - exponent(w))`` of an update."""
        lost, intended = self._updates[tensor]
        return int(lost), int(intended), ExponentHistogram(REL_MIN, self._relative[tensor]).trimmed()

    def _add(self, batch: pa.RecordBatch, which: Ints) -> None:
        values = {n: float_column(batch, n) for n in (*_COUNTS, "amax", "amin_nonzero", "unchanged", "scale")}
        column = np.maximum(np.searchsorted(self.edges, int_column(batch, "step"), side="right") - 1, 0)
        for name, measured in _measures(values).items():
            np.fmax.at(self._cells[name], (which, column), measured)
        self._sum(batch, which, values)

    def _sum(self, batch: pa.RecordBatch, which: Ints, values: dict[str, Floats]) -> None:
        """Add the rows to the totals, scale removed. Leaves out rows whose scale is no power of two: inexact."""
        scale = np.where(np.isnan(values["scale"]), 1.0, values["scale"])
        mantissa, exponent = np.frexp(scale)
        exact = (mantissa == 0.5) & np.isfinite(scale)
        shift = np.where(exact, exponent - 1, 0).astype(np.int64)
        np.add.at(self._sums[:, len(_COUNTS)], which, 1.0)
        np.add.at(self._sums[:, len(_COUNTS) + 1], which, (~exact).astype(float))
        for at, name in enumerate(_COUNTS):
            np.add.at(self._sums[:, at], which[exact], values[name][exact])
        kept = which[exact]
        with np.errstate(over="ignore", under="ignore"):
            amax, amin = (np.ldexp(values[name], -shift)[exact] for name in ("amax", "amin_nonzero"))
        np.fmax.at(self._extremes[:, 0], kept, amax)
        np.fmin.at(self._extremes[:, 1], kept, amin)
        np.fmin.at(self._scales[:, 0], kept, scale[exact])
        np.fmax.at(self._scales[:, 1], kept, scale[exact])
        start = np.nan_to_num(float_column(batch, "exp_lo")).astype(np.int64) - shift
        _count(self._histograms, EXP_MIN, which, start, batch.column("exp_hist"), exact)
        start = np.nan_to_num(float_column(batch, "rel_lo")).astype(np.int64)
        _count(self._relative, REL_MIN, which, start, batch.column("rel_hist"), np.ones_like(exact))
        lost = values["unchanged"]
        counted = ~np.isnan(lost)
        np.add.at(self._updates[:, 0], which[counted], lost[counted])
        np.add.at(self._updates[:, 1], which[counted], (values["numel"] - values["zero"] + lost)[counted])

    def _identify(self, batch: pa.RecordBatch) -> Ints:
        """The tensor index of each row; fills ``tensors``."""
        _, first, inverse = np.unique(grouped(batch, ("call", *_NAMES)), return_index=True, return_inverse=True)
        for at, row in enumerate(first.tolist()):
            root, module, kind, name, dtype = (str(batch.column(n)[row].as_py()) for n in _NAMES)
            self.tensors.append(TensorId(root, module, kind, name, dtype, int(batch.column("call")[row].as_py())))
            if (order := batch.column("order")[row].as_py()) is not None:
                self._first_order[at] = int(order)
        return inverse


def headroom(survey: Survey, tensor: int) -> Floats | None:
    """Headroom of a tensor in binades, by column; None for an unknown dtype.

    Values are as stored: gradients include their loss scale.
    """
    fmt = known_format(survey.tensors[tensor].dtype)
    if fmt is None:
        return None
    amax = survey.cells("amax")[tensor]
    with np.errstate(divide="ignore", invalid="ignore"):
        room: Floats = math.log2(fmt.max) - np.log2(np.where(amax > 0.0, amax, np.nan))
    return room


def column_spans(survey: Survey) -> list[tuple[int, int]]:
    """First step of each column, and the step before the next column; for the last column the last step."""
    return list(zip(survey.edges.tolist(), [*(survey.edges[1:] - 1).tolist(), survey.last_step], strict=True))


def _count(into: Ints, lowest: int, which: Ints, start: Ints, lists: pa.Array, taken: Bools) -> None:
    """Add the counts of each row in ``taken``, whose first bin is ``start``, to the histogram of its tensor."""
    held = Histograms(start, *entries(lists))
    bins, kept = np.clip(held.bins - lowest, 0, into.shape[1] - 1), taken[held.whose]
    np.add.at(into, (which[held.whose][kept], bins[kept]), held.counts[kept].astype(np.int64))


def _measures(values: dict[str, Floats]) -> dict[str, Floats]:
    """The :data:`MEASURES` of each row; the share of subnormal elements is of the non-zero ones.

    A row whose only non-finite values are -Inf looks like an attention mask: it counts as ``masked``.
    """
    infinite = values["nan"] + values["pos_inf"]
    masked = (infinite == 0) & (values["neg_inf"] > 0)
    alive = values["numel"] - values["zero"] - values["nan"] - values["pos_inf"] - values["neg_inf"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "subnormal": np.where(alive > 0, values["subnormal"] / alive, 0.0),
            "amax": values["amax"],
            "non_finite": np.where(masked, 0.0, infinite + values["neg_inf"]),
            "masked": masked.astype(float),
        }
