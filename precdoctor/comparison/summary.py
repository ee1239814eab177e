"""One tensor over the steps that two runs are compared on, and what can be measured of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import Key, TensorRow, integer, known_format
from precdoctor.diagnosis.survey.view import BAD_COUNTS, Process, RunView
from precdoctor.numerics.tail import flushed_tail

_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "shape", "numel", "order"),
    *(*BAD_COUNTS, "zero", "at_max", "amax", "amin_nonzero", "sum", "sum_sq", "exp_lo", "exp_hist", "unchanged"),
    "scale",
)
_KINDS = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "weight_grad_step", "update", "loss")
_FLUSHED_KINDS = ("output", "input", "grad_output", "weight_grad")
#: Mantissa bits, the leading one not counted, of a dtype nobody knows: it never makes a limit wider.
_UNKNOWN_BITS = 23


@dataclass(frozen=True)
class Start:
    """A tensor on the first compared step, loss scale taken out: where two runs of one seed must still agree."""

    rms: float
    mean: float
    amax: float


@dataclass
class Summary:
    """One tensor over the compared steps of one run, all ranks together.

    Attributes:
        order: its place in the execution order of the first compared step; None when the log does not know.
        numel: summed over steps and ranks, as are the counts after it.
        amax: the largest, as it lies in memory.
        squares: per step the sum of squares and the number of finite elements, loss scale taken out.
        start: on the first compared step; None without finite elements.
    """

    dtype: str
    shape: tuple[int, ...]
    module_class: str
    order: int | None = None
    numel: int = 0
    zero: int = 0
    flushed: float = 0.0
    alive: float = 0.0
    at_max: int = 0
    intended: int = 0
    unchanged: int = 0
    amax: float = 0.0
    badness: set[str] = field(default_factory=set)
    bad_elements: int = 0
    first_bad_step: int | None = None
    squares: dict[int, tuple[float, int]] = field(default_factory=dict)
    start: Start | None = None

    @property
    def flushed_share(self) -> float:
        """Of the intended non-zero elements; the estimator is that of PD201."""
        total = self.flushed + self.alive
        return self.flushed / total if total else 0.0

    @property
    def at_max_share(self) -> float:
        """Elements exactly at the dtype's maximum."""
        return self.at_max / self.numel if self.numel else 0.0

    @property
    def zero_share(self) -> float:
        """Elements that are zero, for whatever reason."""
        return self.zero / self.numel if self.numel else 0.0

    @property
    def lost_share(self) -> float:
        """Lost among the intended updates."""
        return self.unchanged / self.intended if self.intended else 0.0

    @property
    def headroom(self) -> float | None:
        """Binades between the largest amax and the dtype's maximum."""
        fmt = known_format(self.dtype)
        return fmt.headroom(self.amax) if fmt is not None and self.amax > 0.0 else None

    @property
    def rms(self) -> float | None:
        """log2 of the root mean square, the median over the steps; None where no step has a non-zero element."""
        found = [_log_rms(*entry) for entry in self.squares.values() if entry[0] > 0.0]
        return median(found) if found else None

    @property
    def rms_first(self) -> float | None:
        """log2 of the root mean square on the first step it was seen on, when repeats lie closest together."""
        first = self.squares[min(self.squares)] if self.squares else (0.0, 0)
        return _log_rms(*first) if first[0] > 0.0 else None

    @property
    def numel_per_step(self) -> int:
        """Elements that one step's figures rest on."""
        return max((count for _, count in self.squares.values()), default=1)


def _log_rms(square: float, count: int) -> float:
    return 0.5 * math.log2(square / count)


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest in ``dtype``: 2**-24 for float32, 2**-8 for bfloat16."""
    fmt = known_format(dtype)
    return 2.0 ** -((fmt.mantissa_bits if fmt is not None else _UNKNOWN_BITS) + 1)


@dataclass(frozen=True)
class Metric:
    """A figure of one tensor: its name in baseline files and limits, its unit, and how it is had."""

    name: str
    unit: str
    doc: str
    of: Callable[[Summary], float | None]
    #: Kinds of tensors it says something about; empty means all.
    kinds: tuple[str, ...] = ()

    def words(self, value: float) -> str:
        """``value`` for a reader."""
        return percent(value) if self.unit == "fraction" else f"{value:.4g} {self.unit}".strip()


#: What a baseline keeps of every tensor.
METRICS: tuple[Metric, ...] = (
    Metric("rms", "binades", "log2 of the root mean square, median over the steps", lambda s: s.rms),
    Metric("rms_first", "binades", "the same on the first step", lambda s: s.rms_first),
    Metric("headroom", "binades", "log2 of the dtype's maximum over the largest magnitude", lambda s: s.headroom),
    Metric("flushed", "fraction", "non-zero elements rounded to zero", lambda s: s.flushed_share, _FLUSHED_KINDS),
    Metric("saturated", "fraction", "elements at the dtype's largest number", lambda s: s.at_max_share,
           (*_FLUSHED_KINDS, "weight")),
    Metric("zeros", "fraction", "elements that are zero", lambda s: s.zero_share, ("grad_output", "weight_grad")),
    Metric("lost", "fraction", "intended updates that left their weight unchanged", lambda s: s.lost_share,
           ("update",)),
)  # fmt: skip


#: The metrics that are shares of a tensor's elements.
SHARES = tuple(m.name for m in METRICS if m.unit == "fraction")


def shares_of(kind: str) -> tuple[str, ...]:
    """Those that a tensor of this kind has."""
    return tuple(m.name for m in METRICS if m.name in SHARES and kind in m.kinds)


def metrics_of(summary: Summary, kind: str) -> dict[str, float]:
    """Every metric that applies to a tensor of this kind and has a value."""
    if kind == "loss":  # compared as the loss; a single number has no distribution
        return {}
    found = {m.name: m.of(summary) for m in METRICS if not m.kinds or kind in m.kinds}
    return {name: value for name, value in found.items() if value is not None}


#: Bytes that the sum of squares of a row takes, and rows after which they are counted anew.
_SQUARE_COST, _COUNTED = 250, 1 << 14


def summaries(view: RunView, steps: Sequence[int]) -> dict[Key, Summary]:
    """Every tensor of a run over ``steps``. Gradients of steps that a loss scaler skipped are left out."""
    found: dict[Key, Summary] = {}
    for number, record in enumerate(view.scan_records(_COLUMNS, _KINDS, steps=steps)):
        if not number % _COUNTED:
            view.run.budget.keep("squares", _SQUARE_COST * number)
        row = TensorRow.of(record)
        facts = view.step_facts(Process(row.rank, row.attempt), row.step)
        if row.phase == "recompute" or (facts is not None and facts.skipped and "grad" in row.kind):
            continue  # an overflow the scaler took care of says nothing about the next clean step
        summary = found.setdefault(row.key, Summary(row.dtype, row.shape, row.module_class))
        _add(summary, row, integer(record["unchanged"]))
        if row.step == steps[0] and summary.start is None:
            summary.order = row.order
            summary.start = _start(row)
    return found


def _add(summary: Summary, row: TensorRow, unchanged: int | None) -> None:
    summary.numel += row.numel
    summary.zero += row.zero
    summary.at_max += row.at_max
    summary.amax = max(summary.amax, row.amax or 0.0)
    if row.bad:
        summary.badness |= row.badness
        summary.bad_elements += row.nan + row.inf
        summary.first_bad_step = row.step if summary.first_bad_step is None else min(summary.first_bad_step, row.step)
    finite = row.numel - row.nan - row.inf
    if row.sum_sq is not None and math.isfinite(row.sum_sq) and finite > 0:
        square, count = summary.squares.get(row.step, (0.0, 0))
        summary.squares[row.step] = (square + row.sum_sq / _scale(row) ** 2, count + finite)
    if row.kind == "update" and unchanged is not None:
        summary.unchanged += unchanged
        summary.intended += row.numel - row.zero + unchanged
    fmt = known_format(row.dtype)
    if fmt is not None and row.kind in _FLUSHED_KINDS:
        near = row.amin_nonzero is not None and row.amin_nonzero <= 4.0 * fmt.min_subnormal
        summary.flushed += flushed_tail(row.histogram, row.zero, fmt).total if near else 0.0
        summary.alive += row.numel - row.zero


def _scale(row: TensorRow) -> float:
    return row.scale if row.scale is not None and 0.0 < row.scale < math.inf else 1.0


def _start(row: TensorRow) -> Start | None:
    finite = row.numel - row.nan - row.inf
    if row.rms is None or row.sum is None or row.amax is None or finite <= 0:
        return None
    scale = _scale(row)
    figures = (row.rms / scale, row.sum / finite / scale, row.amax / scale)
    return Start(*figures) if all(math.isfinite(figure) for figure in figures) else None
