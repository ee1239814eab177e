"""FP8 operands: the input of every cast to a float8 dtype, step by step, and the cost of the cast.

Rows of kind ``fp8_operand`` hold the tensor just before the cast, multiplied by the quantiser's scale, so that its
exponents are in the unit of the format. The effect of another scale follows from them, with the quotient of the two
scales as multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from precdoctor.diagnosis.survey.histogram_columns import exponents
from precdoctor.diagnosis.survey.rows import (
    Key,
    integer,
    key_of,
    known_format,
    number,
    path_evidence,
    path_to,
    range_evidence,
    text,
)
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.cast_counts import HistogramTable, cast_counts
from precdoctor.numerics.formats import Format
from precdoctor.numerics.fp8_scaling import AmaxSeries, Recipe, scale_series
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.prediction import TensorStatistics, predict

KIND = "fp8_operand"
#: Columns of the log that every rule on FP8 operands needs.
COLUMNS = ("scale", "format", "saturated", "flushed", "amax", "exp_lo", "exp_hist")
#: Number of examined steps, to bound memory: this many of the newest, and as many spread over the older ones.
_NEWEST = _SPREAD = 128
#: Casts per operand on which a full prediction is made, to bound the time; chosen empirically.
_SPOTS = 3
_READ = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "numel", "zero"),
    *("nan", "pos_inf", "neg_inf", "amin_nonzero", "sum_sq", *COLUMNS),
)
_ROLES = {"input": "input of", "weight": "weight of", "grad_output": "output gradient of"}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cast:
    """One operand at one step; of several casts (micro-steps, ranks) the sum of the counts, the rest of the largest.

    Attributes:
        statistics: of the elements as they are cast: times ``scale``.
        peak: largest finite magnitude given to the cast; 0 when there is none but zero.
        scale: the multiplier in force; None where not known.
        alive: number of finite elements that are not zero.
        saturated, flushed: exact counts; 0 saturated where the tensor may have been clipped before it was recorded.
        non_finite: number of NaN and infinities.
    """

    process: Process
    step: int
    statistics: TensorStatistics
    peak: float
    scale: float | None
    numel: int
    alive: int
    saturated: int
    flushed: int
    non_finite: int

    @property
    def scale_is_sound(self) -> bool:
        """Whether the scale is finite and above zero, or not known."""
        return self.scale is None or 0.0 < self.scale < math.inf

    @property
    def sound(self) -> bool:
        """Whether neither the scale nor an element is non-finite."""
        return self.scale_is_sound and self.non_finite == 0

    @property
    def amax(self) -> float | None:
        """Amax of the tensor before scaling; None where the scale is unknown or unsound."""
        if self.scale is None or not self.sound:
            return None
        return self.peak / self.scale

    @property
    def flushed_share(self) -> float:
        """Flushed among the finite non-zero elements."""
        return self.flushed / self.alive if self.alive else 0.0

    @property
    def saturated_share(self) -> float:
        """Clipped among all elements."""
        return self.saturated / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class Damage:
    """The cost of a cast.

    Attributes:
        flushed, saturated: shares of the finite non-zero elements.
        lost_magnitude: share of the sum of magnitudes in the flushed elements.
        sqnr_db: signal to quantisation noise.
        lost_db: distance of that below rounding to the format's mantissa alone; not negative.
    """

    flushed: float
    saturated: float
    lost_magnitude: float
    sqnr_db: float
    lost_db: float


@dataclass(frozen=True, eq=False)
class Replayed:
    """An operand under a scaling recipe, over its casts of known scale.

    Attributes:
        scale: the recipe's, shape ``(casts,)``.
        flushed, saturated: shares of the non-zero elements, shape ``(casts,)``.
        peak: amax times scale over the format's maximum, shape ``(casts,)``.
    """

    scale: Floats
    flushed: Floats
    saturated: Floats
    peak: Floats


@dataclass(frozen=True, eq=False)
class Operand:
    """One operand over the examined steps.

    Attributes:
        fmt: format of the cast's result.
        dtype: of its input.
        casts: one per step, in order.
    """

    key: Key
    module_class: str
    fmt: Format
    dtype: str
    casts: tuple[Cast, ...]

    @property
    def place(self) -> str:
        """The module, or the root."""
        return self.key[1] or self.key[0]

    @property
    def label(self) -> str:
        """Its name in messages: ``input of `blocks.3.mlp.up```."""
        name = self.key[3]
        role, _, number = name.partition(".")
        if role not in _ROLES:
            return f"FP8 operand `{name}` of `{self.place}`"
        return f"{_ROLES[role]} `{self.place}`" + (f" (`{name}`)" if number else "")

    @property
    def gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.key[3].startswith("grad")

    @cached_property
    def settled(self) -> tuple[Cast, ...]:
        """Sound casts with a non-zero element, without the first recorded one, whose history may be empty."""
        casts = [c for c in self.casts if c.sound and c.alive]
        return tuple(casts if len(self.casts) == 1 else [c for c in casts if c is not self.casts[0]])

    @cached_property
    def scaled(self) -> tuple[Cast, ...]:
        """The settled casts of known scale."""
        return tuple(c for c in self.settled if c.amax is not None)

    @cached_property
    def flushed_share(self) -> float:
        """Median over steps."""
        return median(c.flushed_share for c in self.settled) if self.settled else 0.0

    @cached_property
    def saturated_share(self) -> float:
        """Median over steps."""
        return median(c.saturated_share for c in self.settled) if self.settled else 0.0

    @cached_property
    def per_tensor(self) -> bool:
        """Whether every settled cast has one known scale for the whole tensor."""
        return bool(self.settled) and all(c.scale is not None for c in self.settled)

    @cached_property
    def spots(self) -> tuple[Cast, ...]:
        """A few settled casts, evenly spread."""
        casts = self.settled
        at = np.unique(np.linspace(0, len(casts) - 1, min(_SPOTS, len(casts))).round().astype(int)) if casts else ()
        return tuple(casts[int(i)] for i in at)

    @cached_property
    def typical(self) -> Cast:
        """The settled cast whose flushed share is the median one (the lower of two)."""
        return sorted(self.settled, key=lambda c: (c.flushed_share, c.step))[(len(self.settled) - 1) // 2]

    @cached_property
    def clipping(self) -> Damage:
        """Cost of the settled cast with the median saturated share (the lower of two).

        A scale that is computed now and then costs nothing on some steps and much on others; ``cost``, of a few steps,
        may meet only the former.
        """
        casts = sorted(self.settled, key=lambda c: (c.saturated_share, c.step))
        return damage(casts[(len(casts) - 1) // 2].statistics, self.fmt)

    @cached_property
    def cost(self) -> Damage:
        """Cost of the cast at the scale in force."""
        return self.damage()

    @cached_property
    def fitted(self) -> Damage:
        """Cost at the scale of each step's own amax."""
        return self.damage(rescaled=True)

    def damage(self, fmt: Format | None = None, *, rescaled: bool = False) -> Damage:
        """Cost of the cast, median over a few steps, field by field.

        Args:
            fmt: another format.
            rescaled: at the scale of each step's own amax instead of the one in force.
        """
        target = fmt or self.fmt
        each = [damage(c.statistics, target, _filling(c, target) if rescaled else 1.0) for c in self.spots]
        names = ("flushed", "saturated", "lost_magnitude", "sqnr_db", "lost_db")
        return Damage(**{n: median(getattr(d, n) for d in each) for n in names})

    def replay(self, recipe: Recipe, fmt: Format | None = None) -> Replayed:
        """Replay ``recipe`` over the whole series, with counts at the casts of known scale."""
        target = fmt or self.fmt
        series = AmaxSeries.of([c.amax for c in self.casts], [c.step for c in self.casts])
        known = np.array([c.amax is not None for c in self.casts], dtype=np.bool_)
        scale = scale_series(series, target, recipe).scale[known]
        casts = [c for c in self.casts if c.amax is not None]
        own = np.array([c.scale or 1.0 for c in casts])
        peak = np.array([c.peak for c in casts])
        counts = cast_counts(HistogramTable.of([c.statistics.histogram for c in casts], peak), target, scale / own)
        total = np.maximum(counts.total, 1.0)
        return Replayed(scale, counts.flushed / total, counts.saturated / total, peak / own * scale / target.max)

    def evidence(self, view: RunView, cast: Cast) -> dict[str, Any]:
        """The fixed-shape ``range`` and ``path`` of a finding, the range in the unit of the format."""
        rows = view.rows(cast.process, cast.step)
        mine = [r for r in rows if r.key == self.key and r.amax == cast.peak]
        if not mine:
            return {}
        row = replace(mine[0], dtype=self.fmt.dtype)
        return {"range": range_evidence(row), "path": path_evidence(path_to(rows, row))}


def damage(statistics: TensorStatistics, fmt: Format, multiplier: float = 1.0) -> Damage:
    """Cost of casting ``tensor * multiplier`` to ``fmt``, clipping at its maximum."""
    found = predict(statistics, fmt, scale=multiplier, saturate=True)
    sqnr = found.sqnr_db.estimate
    lost = max(0.0, rounding_db(fmt) - sqnr) if statistics.histogram.total else 0.0
    return Damage(
        found.flushed.estimate, found.saturated.estimate, flushed_magnitude(statistics.histogram, fmt, multiplier),
        sqnr, lost,
    )  # fmt: skip


def rounding_db(fmt: Format) -> float:
    """SQNR of rounding to the format's mantissa and nothing else: 32.2 dB in E4M3, 26.2 dB in E5M2.

    The error is even over an ulp of ``2**-m``, its square ``4**-m / 12``; significands are spread as 1/x over a binade,
    and the mean of their squares is ``1.5 / ln 2``.
    """
    return 10.0 * math.log10(12.0 * 4.0**fmt.mantissa_bits * 1.5 / math.log(2.0))


def rounding_magnitude(fmt: Format) -> float:
    """Mean of |error| / |x| in that rounding: 2.3 % in E4M3, 4.5 % in E5M2 (an even error of up to half an ulp)."""
    return 2.0**-fmt.mantissa_bits / 4.0 * 0.5 / math.log(2.0)


def flushed_magnitude(histogram: ExponentHistogram, fmt: Format, multiplier: float = 1.0) -> float:
    """Share of the sum of magnitudes in elements that become zero, each at the middle of its bin."""
    trimmed = histogram.trimmed()
    if not trimmed.counts.size:
        return 0.0
    middle = 1.5 * np.exp2(np.arange(trimmed.counts.size) - float(trimmed.counts.size))  # relative to the top bin
    mass = trimmed.counts * middle
    # how many binades lie between the lower end of the first bin and the flush limit
    depth = math.log2(fmt.flush_limit) - math.log2(multiplier) - trimmed.lo
    share = np.clip(depth - np.arange(trimmed.counts.size), 0.0, 1.0)
    return float((mass * share).sum() / mass.sum())


def _filling(cast: Cast, fmt: Format) -> float:
    """Multiplier that brings the cast's amax to the format's maximum."""
    return fmt.max / cast.peak if cast.peak else 1.0


def operands(view: RunView) -> Mapping[Key, Operand]:
    """Every operand that training cast to a float8 dtype; read once per view."""
    return view.remember("fp8-operands", lambda: _read(view))


def _steps(view: RunView) -> list[int]:
    steps = list(view.kept_steps)
    older, newest = steps[:-_NEWEST], steps[-_NEWEST:]
    return [*older[:: max(1, math.ceil(len(older) / _SPREAD))], *newest]


def _read(view: RunView) -> dict[Key, Operand]:
    casts: dict[Key, dict[int, Cast]] = {}
    facts: dict[Key, tuple[str, Format, str]] = {}
    for r in view.scan_records(_READ, (KIND,), steps=_steps(view)):
        if r["phase"] == "recompute":
            continue
        fmt = known_format(text(r["format"]))
        cast = _cast(r)
        if fmt is None or cast is None:
            continue
        key = key_of(r)
        mine = casts.setdefault(key, {})
        mine[cast.step] = _together(mine[cast.step], cast) if cast.step in mine else cast
        facts[key] = text(r["module_class"]), fmt, text(r["dtype"])
    return {k: Operand(k, *facts[k], tuple(c for _, c in sorted(mine.items()))) for k, mine in casts.items()}


def _cast(r: Mapping[str, Any]) -> Cast | None:
    saturated, flushed = integer(r["saturated"]), integer(r["flushed"])
    if flushed is None:
        return None
    statistics = _statistics(r)
    return Cast(
        process=Process(int(r["rank"]), int(r["attempt"])),
        step=int(r["step"]),
        statistics=statistics,
        peak=number(r["amax"]) or 0.0,
        scale=number(r["scale"]),
        numel=int(r["numel"]),
        alive=statistics.histogram.total,
        saturated=saturated or 0,
        flushed=flushed,
        non_finite=int(r["nan"]) + int(r["pos_inf"]) + int(r["neg_inf"]),
    )


def _statistics(r: Mapping[str, Any]) -> TensorStatistics:
    """Statistics of a row; of its exponents alone if its columns contradict each other."""
    histogram = exponents("exp_hist", r["exp_lo"], r["exp_hist"])
    # A scale that is no power of two takes the elements off the grid of their dtype.
    source = known_format(text(r["dtype"])) if number(r["scale"]) == 1.0 else None
    try:
        return TensorStatistics(
            histogram, number(r["amax"]) or None, number(r["amin_nonzero"]), number(r["sum_sq"]), source
        )
    except ValueError:
        return TensorStatistics(histogram)


def _together(a: Cast, b: Cast) -> Cast:
    """Merge two casts of one operand at one step: the counts of both, the rest of the unsound or larger one."""
    size = lambda c: (not c.sound, c.amax if c.amax is not None else c.peak)  # noqa: E731
    larger = max(a, b, key=size)
    names = ("numel", "alive", "saturated", "flushed", "non_finite")
    return replace(larger, **{n: getattr(a, n) + getattr(b, n) for n in names})
