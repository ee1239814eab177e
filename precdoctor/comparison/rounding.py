"""Runs that begin from the same weights and data must agree on the first step, but for rounding.

Statistics over seeds cannot see a matmul that went from FP32 to TF32; the first step of a run with a pinned seed can.
Tensors are gone through in execution order, forward and backward. With ``d`` the difference of a tensor in the two
runs, RMS and mean differ by at most ``|d| / sqrt(n)`` and amax by at most the largest element of ``d``, so a figure
beyond its limit proves an error beyond it. Limits, in units ``u`` of roundoff: ``4 u`` for amax, the first limit of a
relative L2 error; ``4 u / sqrt(n)`` for RMS and mean, whose standard deviation is ``0.6 u / sqrt(n)`` when all ``n``
elements are rounded on their own on both sides; and 32 units of float32 for what elements share, which is what a norm
computed in another way makes of inputs far from zero. Up to the first tensor that differs nothing upstream has a say,
so ``u`` is that of its own module; after it that of the narrowest dtype so far, and a growth is allowed for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from precdoctor.comparison.baseline import Expected
from precdoctor.comparison.pairing import Pairing
from precdoctor.comparison.summary import Start, Summary, unit_roundoff
from precdoctor.diagnosis.survey.rows import Key

_CHECKED = ("input", "output", "grad_output", "weight_grad")
_SINGLE = unit_roundoff("float32")
#: Units of float32 that all elements of a tensor may be off together.
_SHARED = 32.0
#: Figures closer than this are equal: they are sums of products in float64, in another order.
_EQUAL = 1e-11
#: An amax lies within so many RMS of zero in any Gaussian tensor; what an error of every element may add to it.
_TAIL = 6.0


@dataclass(frozen=True)
class Deviation:
    """One tensor on the first step, against the same tensor computed from the same values.

    Attributes:
        error: relative difference of RMS, mean or amax, the one that is furthest beyond its limit.
        limit: how large it may be.
        figure: which one it is.
    """

    key: Key
    error: float
    limit: float
    figure: str

    @property
    def excess(self) -> float:
        """Above 1 it is more than rounding."""
        return self.error / self.limit


def same_start(pairing: Pairing) -> int | None:
    """Which of the baseline's starts this run shares: equal weights and equal data; None when none."""
    count = max((len(e.starts) for e in pairing.expected.values()), default=0)
    for at in range(count):
        pairs = [(key, s, _start(e, at)) for key, s, e in pairing.common]
        weights = [_equal(s, e) for key, s, e in pairs if key[2] == "weight" and s.start is not None]
        data = [_equal(s, e) for key, s, e in _data(pairs)]
        if weights and data and all(weights) and all(data):
            return at
    return None


def _data(pairs: Sequence[tuple[Key, Summary, Start | None]]) -> Iterable[tuple[Key, Summary, Start | None]]:
    """The batches; where none was recorded, the first input in execution order."""
    batches = [p for p in pairs if p[0][2] == "batch"]
    inputs = [p for p in pairs if p[0][2] == "input" and p[1].order is not None]
    return batches or sorted(inputs, key=lambda p: p[1].order or 0)[:1]


def _start(expected: Expected, at: int) -> Start | None:
    return expected.starts[at] if at < len(expected.starts) else None


def _equal(found: Summary, expected: Start | None) -> bool:
    """Within four unit roundoffs: weights of the same seed, be they in another dtype now."""
    if found.start is None or expected is None:
        return found.start is None and expected is None
    limit = 4.0 * unit_roundoff(found.dtype)
    return all(error <= limit for error in differences(found.start, expected).values())


def differences(found: Start, expected: Start) -> Mapping[str, float]:
    """Relative differences of two tensors' figures, by figure; the mean's is relative to the RMS."""
    scale = max(found.rms, expected.rms)
    if scale == 0.0:
        return {"rms": 0.0, "mean": 0.0, "amax": 0.0}
    return {
        "rms": abs(found.rms - expected.rms) / scale,
        "mean": abs(found.mean - expected.mean) / scale,
        "amax": abs(found.amax - expected.amax) / (max(found.amax, expected.amax) + _TAIL * scale),
    }


def deviations(pairing: Pairing, at: int, growth: float) -> Iterator[Deviation]:
    """Every checked tensor of the first step in execution order, against the baseline's start ``at``.

    Args:
        growth: by how much rounding errors may grow between modules.
    """
    chosen = [(k, s, e) for k, s, e in pairing.common if k[2] in _CHECKED and s.start is not None]
    ordered = sorted(chosen, key=lambda c: (c[2].order is None, c[2].order or 0))
    local = _module_units(chosen)
    differs, widest = False, _SINGLE
    for key, found, expected in ordered:
        before = _start(expected, at)
        if before is None or found.start is None:
            continue
        own = max(local[key[:2]], unit_roundoff(expected.dtype))
        widest = max(widest, own)
        factor, unit = (growth, widest) if differs else (1.0, own)
        elements = max(1, found.numel_per_step)
        spread = factor * (_SHARED * _SINGLE + 4.0 * unit / math.sqrt(elements))
        limits = {"rms": spread, "mean": spread, "amax": factor * max(_SHARED * _SINGLE, 4.0 * unit)}
        errors = differences(found.start, before)
        figure = max(errors, key=lambda name: errors[name] / limits[name])
        yield Deviation(key, errors[figure], limits[figure], figure)
        differs = differs or max(errors.values()) > _EQUAL


def _module_units(tensors: Sequence[tuple[Key, Summary, Expected]]) -> dict[tuple[str, str], float]:
    """Per module the unit roundoff of the narrowest tensor the baseline has of it: what it may compute in."""
    units: dict[tuple[str, str], float] = {}
    for key, _, expected in tensors:
        place = (key[0], key[1])
        units[place] = max(units.get(place, _SINGLE), unit_roundoff(expected.dtype))
    return units
