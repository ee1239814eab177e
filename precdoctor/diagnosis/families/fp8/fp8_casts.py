"""FP8 operands: the input of every cast to a float8 dtype, step by step, and the cost of the cast.

Rows of kind ``fp8_operand`` hold the tensor just before the cast, multiplied by the quantiser's scale, so that its
exponents are in the unit of the format. To predict the effect of another scale, these exponents are multiplied by the
quotient of the two scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.analyses.histories import thinned
from precdoctor.diagnosis.claims.finding import Location, Phase
from precdoctor.diagnosis.families.fp8.fp8_damage import Damage, damage, medians
from precdoctor.diagnosis.survey.frames import Ints, Mask, groups, histograms, keys, lasts
from precdoctor.diagnosis.survey.measures import column, format_values
from precdoctor.diagnosis.survey.rows import Key, known_format, number, tensor_evidence, tensor_location, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView, remembered
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram, Histograms
from precdoctor.numerics.prediction import TensorStatistics

KIND = "fp8_operand"
#: Number of examined steps, to bound memory: this many of the newest, and as many spread over the older ones.
_NEWEST = _SPREAD = 128
#: Casts per operand on which a full prediction is made, to bound the time; chosen empirically.
_SPOTS = 3
#: Points of a history in the evidence; a plot needs no more.
_SHOWN = 64
_COLUMNS = (
    *("module_class", "phase", "dtype", "numel", "amin_nonzero", "sum_sq", "scale", "format", "saturated", "flushed"),
    *("amax", "exp_lo", "exp_hist"),
)
_ROLES = {"input": "input of", "weight": "weight of", "grad_output": "output gradient of"}


@dataclass(frozen=True, eq=False)
class Cast:
    """One operand at one step.

    Of several casts on a step (micro-steps, ranks) counts are summed; all else is of the worst cast: one that is not
    sound, else the one with the largest amax.

    Attributes:
        statistics: of the elements as they are cast: times ``scale``.
        peak: largest finite magnitude given to the cast; 0 if there is none above zero.
        scale: the multiplier in force; None if unknown.
        amax: of the tensor before scaling; None if the scale is unknown or the cast is not sound.
        alive: number of finite elements that are not zero.
        saturated_share: share of all elements that are clipped.
        non_finite: number of NaN and infinities.
    """

    process: Process
    step: int
    statistics: TensorStatistics
    peak: float
    scale: float | None
    amax: float | None
    numel: int
    alive: int
    saturated_share: float
    non_finite: int

    @property
    def scale_words(self) -> str:
        """Amax before and after scaling, as a clause."""
        if self.scale is None:
            return f"values up to {self.peak:.3g} reach the cast, at a scale that is not in the log"
        return f"amax {self.amax or 0.0:.3g} times the scale {self.scale:.3g} is {self.peak:.3g}"


@dataclass(frozen=True, eq=False)
class Casts(Sequence[Cast]):
    """Casts of one operand at increasing steps, column by column; fields as in :class:`Cast`, shape ``(casts,)``.

    Attributes:
        scale: NaN if unknown.
        saturated, flushed: exact counts; 0 saturated if the tensor may have been clipped before it was recorded.
        row: index of each cast into ``histograms`` and the columns of ``log``.
        log: columns of the log by name.
    """

    rank: Ints
    attempt: Ints
    step: Ints
    peak: Floats
    scale: Floats
    numel: Ints
    alive: Ints
    saturated: Ints
    flushed: Ints
    non_finite: Ints
    row: Ints
    log: Mapping[str, npt.NDArray[Any]]
    histograms: Histograms

    def __len__(self) -> int:
        return int(self.step.size)

    @overload
    def __getitem__(self, at: int) -> Cast: ...

    @overload
    def __getitem__(self, at: slice | npt.NDArray[Any] | list[int]) -> Casts: ...

    def __getitem__(self, at: int | slice | npt.NDArray[Any] | list[int]) -> Cast | Casts:
        """Return one cast for an index; for a slice, a mask or several indices the casts there."""
        if isinstance(at, (int, np.integer)):
            return self._cast(int(at))
        return replace(self, **{name: getattr(self, name)[at] for name in _PER_CAST})

    def _cast(self, at: int) -> Cast:
        row = int(self.row[at])
        return Cast(
            process=Process(int(self.rank[at]), int(self.attempt[at])),
            step=int(self.step[at]),
            statistics=_statistics({n: c[row] for n, c in self.log.items()}, self.histograms.row(row)),
            peak=float(self.peak[at]),
            scale=number(self.scale[at]),
            amax=number(self.amax[at]),
            numel=int(self.numel[at]),
            alive=int(self.alive[at]),
            saturated_share=float(self.saturated_share[at]),
            non_finite=int(self.non_finite[at]),
        )

    @cached_property
    def scale_is_sound(self) -> Mask:
        """Whether each scale is finite and above zero, or unknown."""
        return np.isnan(self.scale) | ((self.scale > 0.0) & (self.scale < math.inf))

    @cached_property
    def sound(self) -> Mask:
        """Whether each cast has a sound scale and no non-finite element."""
        return self.scale_is_sound & (self.non_finite == 0)

    @cached_property
    def amax(self) -> Floats:
        """Amax of the tensor before scaling; NaN if the scale is unknown or the cast is not sound."""
        return self.peak / np.where(self.sound, self.scale, math.nan)

    @cached_property
    def flushed_share(self) -> Floats:
        """Share of the finite non-zero elements of each cast that are flushed."""
        return self.flushed / np.maximum(self.alive, 1)

    @cached_property
    def saturated_share(self) -> Floats:
        """Share of all elements of each cast that are clipped."""
        return self.saturated / np.maximum(self.numel, 1)


_PER_CAST = tuple(f.name for f in fields(Casts) if f.name not in ("log", "histograms"))


@dataclass(frozen=True, eq=False)
class Operand:
    """One operand over the examined steps.

    Attributes:
        fmt: format of the cast's result.
        dtype: dtype of the cast's input.
    """

    key: Key
    module_class: str
    fmt: Format
    dtype: str
    casts: Casts

    @property
    def place(self) -> str:
        """The module, or the root; empty for a cast outside of modules."""
        return self.key[1] or self.key[0]

    @property
    def label(self) -> str:
        """Its name in messages: ``input of `blocks.3.mlp.up```, ``FP8 operand `cast.2` outside of modules``."""
        name = self.key[3]
        role, _, number = name.partition(".")
        if not self.place:
            return f"FP8 operand `{name}` outside of modules"
        if role not in _ROLES:
            return f"FP8 operand `{name}` of `{self.place}`"
        return f"{_ROLES[role]} `{self.place}`" + (f" (`{name}`)" if number else "")

    @property
    def gradient(self) -> bool:
        return self.key[3].startswith("grad")

    @cached_property
    def settles(self) -> Mask:
        """Whether each cast is settled: sound, with a non-zero element, and not the first recorded of several.

        The first cast is left out because its amax history may be empty.
        """
        settles = self.casts.sound & (self.casts.alive > 0)
        settles[: int(len(settles) > 1)] = False
        return settles

    @cached_property
    def settled(self) -> Casts:
        return self.casts[self.settles]

    @property
    def numel(self) -> int:
        """Elements of the first settled cast; 0 without any."""
        return int(self.settled.numel[0]) if self.settled else 0

    @cached_property
    def scaled(self) -> Casts:
        """The settled casts of known scale."""
        return self.settled[~np.isnan(self.settled.amax)]

    @property
    def amax(self) -> float:
        """Amax before scaling of the last settled cast of known scale."""
        return float(self.scaled.amax[-1])

    @cached_property
    def flushed_share(self) -> float:
        """Median flushed share of the settled casts; 0 without any."""
        return float(np.median(self.settled.flushed_share)) if self.settled else 0.0

    @cached_property
    def saturated_share(self) -> float:
        """Median clipped share of the settled casts; 0 without any."""
        return float(np.median(self.settled.saturated_share)) if self.settled else 0.0

    @cached_property
    def per_tensor(self) -> bool:
        """Whether every settled cast has one known scale for the whole tensor."""
        return bool(self.settled) and not np.isnan(self.settled.scale).any()

    @property
    def padding(self) -> float:
        """Binades between amax times scale and the format's maximum, median over steps; negative if it clips."""
        return median(map(self.fmt.headroom, self.settled.peak.tolist()))

    @property
    def confidence(self) -> tuple[float, str]:
        """Confidence of a finding about exact counts over steps, and its reason."""
        if len(self.settled) < 4:
            return 0.7, "counted exactly, on fewer than four steps"
        return 0.9, "flushed and clipped elements were counted at the cast"

    @cached_property
    def spots(self) -> tuple[Cast, ...]:
        """A few settled casts, evenly spread: those on which full predictions are made."""
        casts = self.settled
        at = np.unique(np.linspace(0, len(casts) - 1, min(_SPOTS, len(casts))).round().astype(int)) if casts else ()
        return tuple(casts[int(i)] for i in at)

    @cached_property
    def typical(self) -> Cast:
        """The settled cast whose flushed share is the median one (the lower of two)."""
        return _median_cast(self.settled, self.settled.flushed_share)

    @cached_property
    def clipping(self) -> Damage:
        """Cost of the settled cast with the median saturated share (the lower of two).

        A scale that is computed only now and then costs nothing on some steps and much on others; ``cost``, which
        examines a few casts, may miss the latter.
        """
        return damage(_median_cast(self.settled, self.settled.saturated_share).statistics, self.fmt)

    @cached_property
    def cost(self) -> Damage:
        """Cost of the cast at the recorded scale, median over a few steps."""
        return medians([damage(c.statistics, self.fmt) for c in self.spots])

    @cached_property
    def fitted(self) -> Damage:
        """Cost at the scale of each step's own amax, median over a few steps."""
        return self.fitted_to(self.fmt)

    def fitted_to(self, fmt: Format) -> Damage:
        """Cost of a cast to ``fmt`` at the scale of each step's own amax, median over a few steps."""
        return medians([damage(c.statistics, fmt, fmt.max / c.peak if c.peak else 1.0) for c in self.spots])

    def location(self, cast: Cast) -> Location:
        """Location of a cast."""
        phase = Phase.BACKWARD if self.gradient else Phase.FORWARD
        return tensor_location(self.key, self.module_class, self.key[2], phase, cast.process, cast.step)

    def history(self, casts: Casts) -> list[dict[str, Any]]:
        """The fixed-shape ``history`` of a finding: amax before scaling, headroom after it; including the last cast."""
        shown = casts[:: -max(1, -(-len(casts) // _SHOWN))][::-1]
        return [{"step": c.step, "amax": c.amax, "headroom_binades": self.fmt.headroom(c.peak)} for c in shown]

    def evidence(self, view: RunView, cast: Cast) -> dict[str, Any]:
        """Return the fixed-shape ``range`` and ``path`` of a finding, the range in the unit of the format.

        Empty if the log holds no row of this cast.
        """
        rows = view.rows(cast.process, cast.step)
        mine = [r for r in rows if r.key == self.key and r.amax == cast.peak]
        if not mine:
            return {}
        return tensor_evidence(replace(mine[0], dtype=self.fmt.dtype), rows)


@remembered
def operands(view: RunView) -> Mapping[Key, Operand]:
    """Return every operand that training cast to a float8 dtype, without recomputed activations."""
    steps = thinned(view.kept_steps, _NEWEST, _SPREAD)
    frame = view.measured(("non_finite",), (KIND,), columns=_COLUMNS, steps=steps)
    cast = (frame["phase"] != "recompute") & frame["flushed"].notna() & ~np.isnan(format_values(frame, "max", "format"))
    frame = frame[cast]
    held, tensors = histograms(frame), groups(frame, IDENTITY)
    casts = _merged_casts(frame, held, tensors)
    last = frame.iloc[lasts(tensors)]
    described = zip(last["module_class"].map(text), last["format"], last["dtype"], strict=True)
    found = {}
    for i, (key, (module_class, name, dtype)) in enumerate(zip(keys(last), described, strict=True)):
        fmt = known_format(name)
        assert fmt is not None
        found[key] = Operand(key, module_class, fmt, text(dtype), casts[i])
    return found


def _merged_casts(frame: pd.DataFrame, held: Histograms, tensors: Ints) -> list[Casts]:
    """Return the casts of each operand by step, several on one step merged as :class:`Cast` describes."""
    counted = ("numel", "saturated", "flushed", "non_finite")
    amax = column(frame, "amax")
    rows = Casts(
        rank=frame["rank"].to_numpy(np.int64),
        attempt=frame["attempt"].to_numpy(np.int64),
        step=frame["step"].to_numpy(np.int64),
        peak=np.where(np.isnan(amax), 0.0, amax),
        scale=column(frame, "scale"),
        alive=held.total,
        row=np.arange(len(frame)),
        log={name: frame[name].to_numpy() for name in ("dtype", "scale", "amax", "amin_nonzero", "sum_sq")},
        histograms=held,
        **{name: np.nan_to_num(column(frame, name)).astype(np.int64) for name in counted},
    )
    size = np.where(np.isnan(rows.amax), rows.peak, rows.amax)
    order = np.lexsort((-rows.row, size, ~rows.sound, rows.step, tensors))
    starts = np.flatnonzero((np.diff(tensors[order], prepend=-1) != 0) | (np.diff(rows.step[order], prepend=-1) != 0))
    largest = order[np.append(starts[1:], order.size) - 1] if order.size else order
    summed = ("alive", *counted) if order.size else ()
    sums: dict[str, Any] = {name: np.add.reduceat(getattr(rows, name)[order], starts) for name in summed}
    casts = replace(rows[largest], **sums)
    bounds = np.searchsorted(tensors[largest], np.arange(int(tensors.max(initial=-1)) + 2))
    return [casts[first:end] for first, end in pairwise(bounds.tolist())]


def _statistics(r: Mapping[str, Any], histogram: ExponentHistogram) -> TensorStatistics:
    """Statistics of a row; of its exponents alone if its columns contradict each other."""
    # A scale may take the elements off the grid of their dtype.
    source = known_format(text(r["dtype"])) if number(r["scale"]) == 1.0 else None
    try:
        return TensorStatistics(
            histogram, number(r["amax"]) or None, number(r["amin_nonzero"]), number(r["sum_sq"]), source
        )
    except ValueError:
        return TensorStatistics(histogram)


def _median_cast(casts: Casts, shares: Floats) -> Cast:
    """Return the cast with the median share (the lower of two)."""
    return casts[int(np.argsort(shares, kind="stable")[(len(casts) - 1) // 2])]
