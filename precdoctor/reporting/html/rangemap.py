"""Prepares the data of the range map: exponent histograms of selected steps, and the limits of the formats.

The page computes its predictions from these numbers in ``predict.js``, a port of :mod:`precdoctor.numerics.prediction`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.arrow_rows import batch_records
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, TensorRow, grouped, known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.cells import Limits
from precdoctor.numerics.formats import BF16, E2M1, E4M3FN, E5M2, FP16, FP32, Format
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.numerics.tail import flushed_tail
from precdoctor.reporting.html.layers import MAP_LABEL, SCALED_KINDS, elided, in_order, kind_title, labels
from precdoctor.reporting.html.survey import Survey, TensorId, Total
from precdoctor.reporting.text import clean
from precdoctor.runlog.schema import KINDS

#: The formats that a reader can select; the ranges of the first four are drawn on the map.
FORMATS: tuple[Format, ...] = (FP16, BF16, E4M3FN, E5M2, E2M1, FP32)
#: Most bytes of histograms in the page, and most steps on its slider.
BUDGET = 700_000
MOST_STEPS = 48
#: Least share of the activations in a format for it to count as the run's own.
OWN_SHARE = 0.1
#: The lowest bins of a tail are dropped up to this share of it, to save bytes.
_NEGLIGIBLE = 1e-11
_COLUMNS = (
    *("step", "rank", "attempt", "root", "module", "kind", "name", "call", "dtype", "numel"),
    *("nan", "pos_inf", "neg_inf", "zero", "subnormal", "amax", "amin_nonzero", "exp_lo", "exp_hist", "scale"),
)


def offered(dtype: str) -> Format | None:
    """The format of :data:`FORMATS` that is or is nearest to a recorded dtype; None if it is not floating-point."""
    fmt = known_format(dtype)
    if fmt is None or fmt in FORMATS:
        return fmt
    return min(FORMATS, key=lambda f: (abs(f.bits - fmt.bits), abs(f.mantissa_bits - fmt.mantissa_bits)))


def own_format(survey: Survey) -> Format:
    """The narrowest format of at least a tenth of the activations; E4M3 if operands are cast to FP8.

    Without activations, of the tensors of the forward pass, else of all tensors; FP32 if there are none.
    """
    if any(tensor.kind == "fp8_operand" for tensor in survey.tensors):
        return E4M3FN
    elements: Counter[Format] = Counter()
    for kinds in (("output",), FORWARD_KINDS, KINDS):
        for at, tensor in enumerate(survey.tensors):
            fmt = offered(tensor.dtype) if tensor.kind in kinds else None
            if fmt is not None:
                elements[fmt] += max(survey.total(at).numel, 1)
        if elements:
            break
    shares = {fmt: count / elements.total() for fmt, count in elements.items()}
    return min((fmt for fmt, share in shares.items() if share >= OWN_SHARE), key=lambda fmt: fmt.bits, default=FP32)


def format_data(fmt: Format) -> dict[str, Any]:
    """The limits of a format for ``predict.js``; every number is exact in JSON."""
    limits = Limits.of(fmt)
    return {
        "name": fmt.name,
        "max": fmt.max,
        "minNormal": fmt.min_normal,
        "minSubnormal": fmt.min_subnormal,
        "flush": limits.flush,
        "normal": limits.normal,
        "saturate": limits.saturate,
        "saturateNegative": limits.saturate_negative,
        "tieOverflows": limits.tie_overflows,
    }


def choose_steps(recorded: Sequence[int], wanted: Iterable[int], most: int) -> list[int]:
    """At most ``most`` steps for the slider: first, last, the recorded ones of ``wanted``, others evenly spaced."""
    most = max(2, most)
    if len(recorded) <= most:
        return list(recorded)
    available = set(recorded)
    chosen = list(dict.fromkeys([recorded[-1], recorded[0], *(s for s in wanted if s in available)]))[:most]
    missing = most - len(chosen)
    even = [recorded[round((i + 1) * (len(recorded) - 1) / (missing + 1))] for i in range(missing)]
    return sorted({*chosen, *even})


def steps_of_interest(view: RunView, findings: Iterable[Any]) -> list[int]:
    """The steps of the findings, the last finite steps before them, and the sampled steps next to all of these."""
    steps: list[int] = []
    for finding in findings:
        step, finite = finding.location.step, finding.evidence.get("last_finite_step")
        if step is not None:
            steps.append(int(step))
        if isinstance(finite, int):
            steps.append(finite)
    recorded = view.sampled_steps
    near = [s for step in steps for s in _neighbours(recorded, step)]
    return [*steps, *near]


def _neighbours(recorded: Sequence[int], step: int) -> list[int]:
    at = bisect.bisect_left(recorded, step)
    return [recorded[i] for i in (at - 1, at + 1) if 0 <= i < len(recorded)]


class RangeMap:
    """The histograms of one run that the page embeds.

    Args:
        wanted: steps to include if they were sampled.
        shared: the map of another run for a comparison; its tensor numbers are used, and dtypes may differ.
    """

    def __init__(self, view: RunView, survey: Survey, wanted: Iterable[int], shared: RangeMap | None = None) -> None:
        ordered = in_order(view, survey)
        self.tensors: list[TensorId] = [survey.tensors[t] for t in ordered]
        self._shared = shared is not None
        self._number: dict[tuple[str | int, ...], int] = {}
        for number, tensor in enumerate(self.tensors if shared is None else shared.tensors):
            self._number.setdefault(self._key(tensor), number)
        self._totals: dict[int, tuple[TensorId, Total]] = {}
        for at, tensor in zip(ordered, self.tensors, strict=True):
            if (known := self._number.get(self._key(tensor))) is not None:
                self._totals.setdefault(known, (tensor, survey.total(at)))
        self.recorded = sorted({*view.kept_steps, *set(wanted).intersection(view.sampled_steps)})
        per_step = sum(60 + 6 * t.histogram.counts.size for _, t in self._totals.values()) or 1
        most = min(MOST_STEPS, BUDGET // per_step) // (2 if shared is not None else 1)
        self.steps = choose_steps(self.recorded, wanted, most)
        self._rows = self._load(view, self.steps)

    def thin_out(self) -> bool:
        """Drop every other step, first and last excepted; return False if only these are left."""
        if len(self.steps) <= 2:
            return False
        self.steps = sorted({*self.steps[::2], self.steps[-1]})
        return True

    def data(self) -> dict[str, Any]:
        """The data for the page: ``steps`` with their rows, and ``all``, the rows over all steps, scale removed."""
        merged = [
            _encoded_total(number, tensor.dtype, total)
            for number, (tensor, total) in self._totals.items()
            if total.numel
        ]
        return {
            "recorded": len(self.recorded),
            "steps": [{"step": s, "rows": self._rows.get(s, [])} for s in self.steps],
            "all": merged,
            "grids": {number: _grid(tensor.dtype) for number, (tensor, _) in self._totals.items()},
        }

    def _key(self, tensor: TensorId) -> tuple[str | int, ...]:
        """The identity of a tensor; in a comparison of two runs without its dtype."""
        return tensor.place if self._shared else (*tensor.place, tensor.dtype)

    def _load(self, view: RunView, steps: Sequence[int]) -> dict[int, list[list[Any]]]:
        """The encoded rows of the steps, ranks merged."""
        merged: dict[tuple[int, int], TensorRow] = {}
        records = (r for batch in view.batches(_COLUMNS, KINDS, steps=steps) for r in batch_records(batch))
        for record in records:
            row = TensorRow.of(record)
            tensor = TensorId(row.root, row.module, row.kind, row.name, row.dtype, row.call)
            number = self._number.get(self._key(tensor))
            if number is not None and self._totals[number][0] == tensor:
                place = (row.step, number)
                merged[place] = row if place not in merged else _merged(merged[place], row)
        return grouped((step, _encoded_row(number, row)) for (step, number), row in sorted(merged.items()))


def tensor_data(tensors: Sequence[TensorId]) -> list[dict[str, Any]]:
    """Label and dtype of each tensor, by number; a label too long for the map also has a ``short`` form."""
    names = labels(tensors)
    short = elided(names, MAP_LABEL)
    return [
        {"label": full, "dtype": clean(t.dtype, 40)} | ({"short": short[full]} if short[full] != full else {})
        for t, full in zip(tensors, names, strict=True)
    ]


def kind_data(tensors: Sequence[TensorId]) -> list[dict[str, Any]]:
    """The kinds with a floating-point tensor, each with the numbers of its tensors, in order of depth."""
    kinds = grouped((t.kind, number) for number, t in enumerate(tensors) if known_format(t.dtype) is not None)
    return [
        {"kind": clean(k, 40), "title": kind_title(k), "scaled": k in SCALED_KINDS, "tensors": numbers}
        for k, numbers in kinds.items()
    ]


def _grid(dtype: str) -> list[float] | None:
    """``[mantissa bits, smallest subnormal]`` of a dtype, which determine its values; None if unknown."""
    fmt = known_format(dtype)
    return None if fmt is None else [fmt.mantissa_bits, fmt.min_subnormal]


def _merged(a: TensorRow, b: TensorRow) -> TensorRow:
    """The merged row of two ranks; ``a`` unchanged if their scales differ, because such rows do not merge."""
    if (a.scale or 1.0) != (b.scale or 1.0):
        return a
    counts = {n: getattr(a, n) + getattr(b, n) for n in ("numel", "nan", "pos_inf", "neg_inf", "zero", "subnormal")}
    amax = max((v for v in (a.amax, b.amax) if v is not None), default=None)
    amin = min((v for v in (a.amin_nonzero, b.amin_nonzero) if v is not None), default=None)
    return replace(a, **counts, amax=amax, amin_nonzero=amin, histogram=a.histogram.merge(b.histogram))


def _encoded_row(number: int, row: TensorRow) -> list[Any]:
    """``[tensor, numel, zero, non-finite, subnormal, amax, amin, scale, lo, counts]``, then the tail if there is one.

    The tail, ``first bin, counts``, estimates the elements that the row's own dtype has already rounded to zero.
    """
    scale = row.scale if row.scale and 0.0 < row.scale < math.inf else 1.0
    counts = [row.numel, row.zero, row.nan + row.inf, row.subnormal]
    ends = [_magnitude(v) for v in (row.amax, row.amin_nonzero)]
    return [
        number,
        *counts,
        *ends,
        scale,
        *_encoded(row.histogram),
        *_tail(row.dtype, row.histogram, row.zero, ends[1]),
    ]


def _encoded_total(number: int, dtype: str, total: Total) -> list[Any]:
    """As :func:`_encoded_row`, over all steps: with the scale applied if it never changed, else with scale 1.

    If the scale changed there is no tail, because it cannot be estimated from elements of different scales.
    """
    scale, histogram = total.scale or 1.0, total.histogram
    try:
        histogram = histogram.shift(scale)
    except ValueError:  # scaled back, some elements would lie outside the bins
        scale = 1.0
    ends = [None if v is None else _magnitude(v * scale) for v in (total.amax, total.amin_nonzero)]
    counts = [total.numel, total.zero, total.non_finite, total.subnormal]
    tail = [] if scale != total.scale else _tail(dtype, histogram, total.zero, ends[1])
    return [number, *counts, *ends, scale, *_encoded(histogram), *tail]


def _magnitude(value: float | None) -> float | None:
    """``value`` if it is finite and above zero, else None."""
    return value if value is not None and 0.0 < value < math.inf else None


def _tail(dtype: str, histogram: ExponentHistogram, zeros: int, amin: float | None) -> list[Any]:
    """``[first bin, counts]`` of the flushed tail, as in ``whatif``; empty if the tensor ends far above the smallest
    subnormal.
    """
    fmt = known_format(dtype)
    if fmt is None or amin is None or amin > 4.0 * fmt.min_subnormal or fmt.flush_limit == 0.0:
        return []
    tail = flushed_tail(histogram, zeros, fmt)
    first = int(np.searchsorted(np.cumsum(tail.counts), _NEGLIGIBLE * tail.total))
    return [tail.lo + first, [float(f"{c:.8g}") for c in tail.counts[first:]]] if tail.total > 0.0 else []


def _encoded(histogram: ExponentHistogram) -> tuple[int, str]:
    """``(first bin, counts)``; the counts are in base 36, separated by dots: exact, and half the size of decimals."""
    t = histogram.trimmed()
    return t.lo, ".".join(np.base_repr(c, 36).lower() if c > 0 else "" for c in t.counts.tolist())
