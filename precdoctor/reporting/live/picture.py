"""Aggregates the rows of a running training for the live view; memory grows with the number of tensors, not of rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram

STEP_COLUMNS = (
    *("step", "rank", "loss", "grad_norm", "loss_scale", "lr", "skipped", "non_finite", "sampled"),
    *("recorder_ns", "step_ns"),
)
TENSOR_COLUMNS = (
    *("step", "root", "module", "kind", "name", "dtype", "numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal"),
    *("amax", "exp_lo", "exp_hist", "first_bad_order"),
)
EVENT_COLUMNS = ("event", "data")
#: Kinds that can overflow or underflow. The others repeat them (updates) or are single numbers (loss).
_KINDS = ("batch", "input", "output", "grad_output", "weight_grad", "weight", "master_weight", "buffer")
#: Formats of at most this many bits have no headroom by design: their scale uses the whole range.
_SCALED_BITS = 8
#: Newest steps to read from a batch of rows; several, because with several optimizers a step has only some tensors.
_NEWEST = 4


@dataclass
class Tensor:
    """One tensor on the latest step that has it, over all ranks and calls.

    Attributes:
        mask: all its non-finite values are -Inf, as in an attention mask.
        bad_since: ``(step, place in the execution order)`` since which it has held NaN or Inf; None if it is finite.
    """

    root: str
    module: str
    kind: str
    name: str
    dtype: str
    step: int = -1
    numel: int = 0
    zero: int = 0
    subnormal: int = 0
    non_finite: int = 0
    mask: bool = False
    amax: float | None = None
    histogram: ExponentHistogram = field(default_factory=lambda: ExponentHistogram.of(None, None))
    bad_since: tuple[int, int] | None = None
    _bad_before: tuple[int, int] | None = None

    @property
    def format(self) -> Format | None:
        return known_format(self.dtype)

    @property
    def headroom(self) -> float | None:
        """Binades from amax to the dtype's maximum; None for an unknown dtype, one of at most 8 bits, or amax 0."""
        fmt = self.format
        return fmt.headroom(self.amax) if fmt is not None and fmt.bits > _SCALED_BITS and self.amax else None

    @property
    def subnormal_share(self) -> float:
        """Subnormal elements as a share of the finite non-zero elements."""
        rest = self.numel - self.zero - self.non_finite
        return self.subnormal / rest if rest > 0 else 0.0

    def take(self, row: Mapping[str, Any]) -> None:
        """Add a row: a row of the same step is merged, a row of a later step replaces, an older one is ignored."""
        if row["step"] < self.step:
            return
        if row["step"] > self.step:
            self.step, self.amax, self.mask = row["step"], None, True
            self._bad_before, self.bad_since = self.bad_since, None
            self.numel = self.zero = self.subnormal = self.non_finite = 0
            self.histogram = ExponentHistogram.of(None, None)
        self.numel += row["numel"]
        self.zero += row["zero"]
        self.subnormal += row["subnormal"]
        self.non_finite += row["nan"] + row["pos_inf"] + row["neg_inf"]
        self.mask &= row["nan"] + row["pos_inf"] == 0
        if row["amax"] is not None:
            self.amax = max(row["amax"], self.amax or 0.0)
        if row["exp_hist"]:
            self.histogram = self.histogram.merge(ExponentHistogram.of(row["exp_lo"], row["exp_hist"]))
        if self.non_finite and not self.mask and self.bad_since is None:
            order = row["first_bad_order"]
            self.bad_since = self._bad_before or (self.step, 1 << 62 if order is None else order)


class Picture:
    """The state of a run, aggregated from its rows.

    Attributes:
        series: loss, grad_norm, loss_scale, lr.
        tensors: by root, module, kind, name and dtype.
        last_step: the latest step; None before the first.
        skipped, non_finite, sampled: number of such steps, on the rank that has most.
        dropped: number of dropped rows, by reason.
        trouble: the latest warning or error of the recorder.
    """

    def __init__(self) -> None:
        self.series = {name: Series() for name in ("loss", "grad_norm", "loss_scale", "lr")}
        self.tensors: dict[tuple[str, ...], Tensor] = {}
        self.last_step: int | None = None
        self.dropped: Counter[str] = Counter()
        self.trouble: str | None = None
        self._counts: dict[str, Counter[int]] = {name: Counter() for name in ("skipped", "non_finite", "sampled")}
        self._recorder_ns = self._step_ns = 0
        self._recent: list[int] = []

    @property
    def skipped(self) -> int:
        return max(self._counts["skipped"].values(), default=0)

    @property
    def non_finite(self) -> int:
        return max(self._counts["non_finite"].values(), default=0)

    @property
    def sampled(self) -> int:
        return max(self._counts["sampled"].values(), default=0)

    @property
    def overhead(self) -> float | None:
        """The recorder's share of the time of the run; None if unknown so far."""
        return self._recorder_ns / self._step_ns if self._step_ns else None

    @property
    def step_seconds(self) -> float | None:
        """Median duration of the latest steps in seconds; None if unknown so far."""
        return sorted(self._recent)[len(self._recent) // 2] / 1e9 if self._recent else None

    def take_steps(self, batch: pa.RecordBatch) -> None:
        """Add rows of ``steps`` with :data:`STEP_COLUMNS`."""
        for row in batch.to_pylist():
            step = row["step"]
            self.last_step = step if self.last_step is None else max(step, self.last_step)
            for name, series in self.series.items():
                if row[name] is not None:
                    series.add(step, row[name])
            for name, counts in self._counts.items():
                counts[row["rank"]] += bool(row[name])
            if row["step_ns"] and row["recorder_ns"] is not None:
                self._recorder_ns += row["recorder_ns"]
                self._step_ns += row["step_ns"]
                self._recent = [*self._recent[-31:], row["step_ns"]]

    def take_tensors(self, batch: pa.RecordBatch) -> None:
        """Add rows of ``tensors`` with :data:`TENSOR_COLUMNS`: those of the newest steps, and all with a NaN or Inf."""
        newest = sorted(pc.unique(batch.column("step")).to_pylist())[-_NEWEST:]
        bad = pc.add(pc.add(batch.column("nan"), batch.column("pos_inf")), batch.column("neg_inf"))
        wanted = pc.or_(pc.greater_equal(batch.column("step"), newest[0]), pc.greater(bad, 0))
        wanted = pc.and_(wanted, pc.is_in(batch.column("kind"), pa.array(_KINDS)))
        for row in batch.filter(wanted).to_pylist():
            key = (row["root"], row["module"], row["kind"], row["name"], row["dtype"])
            if key not in self.tensors:
                self.tensors[key] = Tensor(*key)
            self.tensors[key].take(row)

    def take_events(self, batch: pa.RecordBatch) -> None:
        """Add rows of ``events`` with :data:`EVENT_COLUMNS`: counts drops, keeps the latest warning or error."""
        for row in batch.to_pylist():
            if row["event"] not in ("drop", "warning", "error"):
                continue
            try:
                data = json.loads(row["data"] or "{}")
            except (ValueError, RecursionError):
                continue
            if not isinstance(data, dict):
                continue
            if row["event"] == "drop" and isinstance(data.get("rows"), int):
                self.dropped[text(data.get("reason")) or "unknown"] += data["rows"]
            elif row["event"] != "drop":
                self.trouble = text(data.get("message")) or text(data.get("error")) or self.trouble

    def tightest(self, count: int) -> list[Tensor]:
        """The first ``count`` tensors: those with a NaN or Inf, the earliest first, then by headroom, ascending."""
        candidates = [t for t in self.tensors.values() if t.headroom is not None or t.bad_since is not None]
        return sorted(candidates, key=_tightness)[:count]

    def most_subnormal(self, count: int) -> list[Tensor]:
        """The first ``count`` tensors by share of subnormal elements, descending; tensors without any are left out."""
        candidates = [t for t in self.tensors.values() if t.subnormal and t.format is not None]
        return sorted(candidates, key=lambda t: (-t.subnormal_share, t.module, t.kind))[:count]


def _tightness(tensor: Tensor) -> tuple[Any, ...]:
    room = math.inf if tensor.headroom is None else tensor.headroom
    return (tensor.bad_since is None, tensor.bad_since or (0, 0), room, tensor.module, tensor.kind)


#: Most values kept of a series; beyond, neighbouring steps share one value.
MOST = 2048


class Series:
    """Values by step. If steps, ranks or optimizers share a value, it is a non-finite one, else the largest.

    Attributes:
        last: the value of the latest step; None before the first.
    """

    def __init__(self) -> None:
        self._width = 1
        self._cells: dict[int, float] = {}
        self._last: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        """Add a value; steps may come in any order."""
        at = step // self._width
        self._cells[at] = worse(self._cells.get(at), value)
        if self._last is None or step > self._last[0]:
            self._last = (step, value)
        elif step == self._last[0]:
            self._last = (step, worse(self._last[1], value))
        while len(self._cells) > MOST:
            self._width *= 2
            cells, self._cells = self._cells, {}
            for place, kept in cells.items():
                self._cells[place // 2] = worse(self._cells.get(place // 2), kept)

    @property
    def last(self) -> float | None:
        return None if self._last is None else self._last[1]

    @property
    def values(self) -> list[float]:
        """The kept values, ordered by step."""
        return [self._cells[at] for at in sorted(self._cells)]


def worse(a: float | None, b: float) -> float:
    """The worse of two values: a non-finite one, else the larger; ``b`` if ``a`` is None."""
    if a is None or not math.isfinite(b):
        return b
    return a if not math.isfinite(a) else max(a, b)
