"""Summarises each tensor of a run over the compared steps, and defines the metrics that baselines keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.comparison.steps import KINDS, clean_rows
from precdoctor.diagnosis.survey.frames import Ints, firsts, groups, histograms, keys, largest, sums
from precdoctor.diagnosis.survey.measures import Floats, column, format_values
from precdoctor.diagnosis.survey.rows import Key, known_format, text
from precdoctor.diagnosis.survey.view import BAD_COUNTS, IDENTITY, RunView
from precdoctor.numerics.arrays import Bools
from precdoctor.numerics.formats import format_of_dtype
from precdoctor.numerics.tail import flushed_tails

_MEASURES = ("non_finite", "finite", "rms", "multiplier", "intended")
_COLUMNS = (
    *("module_class", "dtype", "order", "at_max", "amax", "amin_nonzero", "sum", *BAD_COUNTS),
    *("numel", "zero", "sum_sq", "unchanged", "shape", "exp_lo", "exp_hist"),
)
_FLUSHED_KINDS = ("output", "input", "grad_output", "weight_grad")
#: Mantissa bits assumed for an unknown dtype, without the leading one: those of float32, so that no limit gets wider.
_UNKNOWN_BITS = 23
_NOTHING: Floats = np.zeros(0)


@dataclass(frozen=True)
class Start:
    """Figures of a tensor on the first compared step, loss scale removed; runs of one seed must agree on them."""

    rms: float
    mean: float
    amax: float


@dataclass
class Summary:
    """One tensor over the compared steps of one run, all ranks together.

    Attributes:
        order: place in the execution order of the first compared step; None if the log does not have it.
        numel: number of elements, summed over steps and ranks, as are all counts.
        flushed, alive: rounded to zero (estimated), and non-zero elements; 0 for kinds and dtypes that are not checked.
        amax: the largest, in the stored units, loss scale included.
        badness: the columns among ``BAD_COUNTS`` with a non-zero count: the kinds of non-finite values.
        squares: sum of squares by step, ascending, loss scale removed; shape ``(steps,)``.
        finite: number of finite elements behind each of ``squares``.
        start: figures on the first compared step; None without finite elements.
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
    squares: Floats = field(default_factory=lambda: _NOTHING)
    finite: Floats = field(default_factory=lambda: _NOTHING)
    start: Start | None = None

    @property
    def flushed_share(self) -> float:
        """Elements rounded to zero, as a share of the intended non-zero elements; estimated as in PD201."""
        total = self.flushed + self.alive
        return self.flushed / total if total else 0.0

    @property
    def at_max_share(self) -> float:
        """Share of elements exactly at the dtype's maximum."""
        return self.at_max / self.numel if self.numel else 0.0

    @property
    def zero_share(self) -> float:
        """Share of elements that are zero, for whatever reason."""
        return self.zero / self.numel if self.numel else 0.0

    @property
    def lost_share(self) -> float:
        """Lost updates as a share of the intended ones."""
        return self.unchanged / self.intended if self.intended else 0.0

    @property
    def headroom(self) -> float | None:
        """Binades between the largest amax and the dtype's maximum; None for an unknown dtype or an amax of zero."""
        fmt = known_format(self.dtype)
        return fmt.headroom(self.amax) if fmt is not None and self.amax > 0.0 else None

    @property
    def rms(self) -> float | None:
        """log2 of the root mean square, median over the steps; None if no step has a non-zero element."""
        means = self.squares / self.finite
        means = np.sort(means[means > 0.0])
        middle = means[(means.size - 1) // 2 : means.size // 2 + 1].tolist()
        return fmean(0.5 * math.log2(square) for square in middle) if middle else None

    @property
    def rms_first(self) -> float | None:
        """log2 of the root mean square on the first step with the tensor, on which repeats differ least."""
        first = self.squares[0] / self.finite[0] if self.squares.size else 0.0
        return 0.5 * math.log2(first) if first > 0.0 else None

    @property
    def numel_per_step(self) -> int:
        """Number of finite elements on the step that has most of them; at least 1."""
        return int(self.finite.max(initial=0.0)) or 1


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest in ``dtype``: 2**-24 for float32, 2**-8 for bfloat16."""
    fmt = known_format(dtype)
    return 2.0 ** -((fmt.mantissa_bits if fmt is not None else _UNKNOWN_BITS) + 1)


@dataclass(frozen=True)
class Metric:
    """A figure of one tensor: its name in baseline files and limits, its unit, and the function that computes it."""

    name: str
    unit: str
    doc: str
    of: Callable[[Summary], float | None]
    #: Kinds of tensors to which it applies; empty means all.
    kinds: tuple[str, ...] = ()


#: The metrics that a baseline keeps of every tensor.
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
    """Names of the :data:`SHARES` that apply to a tensor of this kind."""
    return tuple(m.name for m in METRICS if m.name in SHARES and kind in m.kinds)


def metrics_of(summary: Summary, kind: str) -> dict[str, float]:
    """Every metric that applies to a tensor of this kind and has a value."""
    if kind == "loss":  # PD804 compares it; a single number has no distribution
        return {}
    found = {m.name: m.of(summary) for m in METRICS if not m.kinds or kind in m.kinds}
    return {name: value for name, value in found.items() if value is not None}


def summaries(view: RunView, steps: Sequence[int]) -> dict[Key, Summary]:
    """The summary of every tensor of a run over ``steps``, ascending.

    Gradients of skipped steps are left out: an overflow that a loss scaler handled does not affect the next clean step.
    """
    view.keep(steps)
    frame = clean_rows(view, _MEASURES, (*KINDS, "loss"), _COLUMNS, steps)
    if frame.empty:
        return {}
    tensors = groups(frame, IDENTITY)
    by_key = dict(zip(keys(frame.iloc[firsts(tensors)]), _summaries(frame, tensors), strict=True))
    begun = frame[frame["step"] == steps[0]]
    for key, order, start in zip(keys(begun), *_starts(begun), strict=True):
        if by_key[key].start is None:
            by_key[key].order, by_key[key].start = order, start
    return by_key


def _summaries(frame: pd.DataFrame, tensors: Ints) -> Iterator[Summary]:
    """One summary per tensor, in the order of first appearance; ``tensors`` is the number of each row's tensor."""
    updated = ((frame["kind"] == "update") & frame["unchanged"].notna()).to_numpy()
    narrow = frame["kind"].isin(_FLUSHED_KINDS).to_numpy() & np.isfinite(format_values(frame, "max"))
    counted: dict[str, Any] = {name: column(frame, name) for name in ("numel", "zero", "at_max")}
    counted |= {name: np.where(updated, column(frame, name), 0.0) for name in ("intended", "unchanged")}
    counted["bad_elements"] = frame["non_finite"]
    figures: dict[str, Any] = {
        name: sums(tensors, np.nan_to_num(values)).astype(np.int64) for name, values in counted.items()
    }
    figures["flushed"] = sums(tensors, _flushed(frame, narrow))
    figures["alive"] = sums(tensors, np.where(narrow, counted["numel"] - np.nan_to_num(counted["zero"]), 0.0))
    figures["amax"] = np.fmax(largest(tensors, column(frame, "amax")), 0.0)
    first_bad = -largest(tensors, np.where(frame["non_finite"] > 0, -column(frame, "step"), np.nan))
    bad = np.stack([sums(tensors, frame[c] > 0) > 0 for c in BAD_COUNTS], axis=1)
    first = frame.iloc[firsts(tensors)]
    described = zip(first["dtype"], first["shape"], first["module_class"], _squares(frame, tensors), strict=True)
    for i, (dtype, shape, module_class, (squares, finite)) in enumerate(described):
        yield Summary(
            dtype=str(dtype),
            shape=() if shape is pd.NA or shape is None else tuple(shape),
            module_class=text(module_class),
            badness={c for c, held in zip(BAD_COUNTS, bad[i], strict=True) if held},
            first_bad_step=None if np.isnan(first_bad[i]) else int(first_bad[i]),
            squares=squares,
            finite=finite,
            **{name: values[i].item() for name, values in figures.items()},
        )


def _squares(frame: pd.DataFrame, tensors: Ints) -> Iterator[tuple[Floats, Floats]]:
    """``(sums of squares by step, numbers of finite elements by step)`` of each tensor."""
    squares = column(frame, "sum_sq") / frame["multiplier"].to_numpy() ** 2
    valid = np.isfinite(column(frame, "sum_sq")) & (frame["finite"] > 0).to_numpy()
    steps, step = np.unique(frame["step"].to_numpy()[valid], return_inverse=True)
    used, place = np.unique(tensors[valid] * max(1, steps.size) + step, return_inverse=True)
    bounds = np.searchsorted(used, np.arange(1, int(tensors.max(initial=-1)) + 1) * max(1, steps.size))
    square, finite = sums(place, squares[valid]), sums(place, frame["finite"][valid])
    return zip(np.split(square, bounds), np.split(finite, bounds), strict=True)


def _flushed(frame: pd.DataFrame, narrow: Bools) -> Floats:
    """Elements of each row that rounding made zero; 0 if the smallest element is far above the smallest subnormal."""
    near = narrow & (column(frame, "amin_nonzero") <= 4.0 * format_values(frame, "min_subnormal"))
    flushed = np.zeros(len(frame))
    for dtype in frame["dtype"][near].astype(str).unique():
        rows = np.flatnonzero(near & (frame["dtype"] == dtype))
        zeros = frame["zero"].iloc[rows].to_numpy(np.int64)
        flushed[rows] = flushed_tails(histograms(frame.iloc[rows]), zeros, format_of_dtype(dtype)).total
    return flushed


def _starts(frame: pd.DataFrame) -> tuple[list[int | None], list[Start | None]]:
    """``(execution order, figures)`` of the rows of the first step; None if unknown, or not finite."""
    figures = [frame["rms"], column(frame, "sum") / frame["finite"], column(frame, "amax")]
    scaled = np.stack([np.asarray(f, np.float64) / frame["multiplier"].to_numpy() for f in figures], axis=1)
    order = [None if math.isnan(o) else int(o) for o in column(frame, "order")]
    return order, [Start(*row) if all(map(math.isfinite, row)) else None for row in scaled.tolist()]
