"""Checks that runs with the same initial weights and data agree on the first step up to rounding.

Statistics over seeds do not reveal a matmul that went from FP32 to TF32; the first step with a pinned seed does.
Tensors are compared in execution order, forward and backward. Let ``d`` be the difference of a tensor in the two runs.
RMS and mean then differ by at most ``|d| / sqrt(n)`` and amax by at most the largest element of ``d``, so a figure
beyond its limit proves an error beyond it. Limits, with ``u`` the unit roundoff: ``4 u`` for amax, the limit of a
relative L2 error; ``4 u / sqrt(n)`` for RMS and mean, whose standard deviation is ``0.6 u / sqrt(n)`` if all ``n``
elements are rounded independently in both runs; plus 32 units of float32 for an error common to all elements, such as
a norm computed in another way makes for inputs far from zero. Up to the first tensor that differs, ``u`` is that of
the tensor's own module; after it, that of the narrowest dtype so far, times a factor for the growth of errors.
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
#: Allowed error common to all elements of a tensor, in unit roundoffs of float32.
_SHARED = 32.0
#: Figures closer than this (relative) are equal: they are float64 sums, which may be taken in another order.
_EQUAL = 1e-11
#: The amax of a Gaussian tensor is at most this many RMS. Added, times the RMS, to the scale of a difference of amax.
_TAIL = 6.0


@dataclass(frozen=True)
class Deviation:
    """The deviation of one tensor on the first step from that of the baseline, which began from the same values.

    Attributes:
        error: relative difference of RMS, mean or amax, whichever is largest relative to its limit.
        limit: the largest difference that rounding explains.
        figure: ``rms``, ``mean`` or ``amax``.
    """

    key: Key
    error: float
    limit: float
    figure: str

    @property
    def excess(self) -> float:
        """Error over limit; above 1 the deviation is more than rounding."""
        return self.error / self.limit


def same_start(pairing: Pairing) -> int | None:
    """The index of the baseline's start with the same weights and data as this run; None if there is none."""
    count = max((len(e.starts) for e in pairing.expected.values()), default=0)
    for at in range(count):
        pairs = [(key, s, _start(e, at)) for key, s, e in pairing.common]
        weights = [_equal(s, e) for key, s, e in pairs if key[2] == "weight" and s.start is not None]
        data = [_equal(s, e) for key, s, e in _data(pairs)]
        if weights and data and all(weights) and all(data):
            return at
    return None


def _data(pairs: Sequence[tuple[Key, Summary, Start | None]]) -> Iterable[tuple[Key, Summary, Start | None]]:
    """The pairs of batches; if no batch was recorded, the first input in execution order."""
    batches = [p for p in pairs if p[0][2] == "batch"]
    inputs = [p for p in pairs if p[0][2] == "input" and p[1].order is not None]
    return batches or sorted(inputs, key=lambda p: p[1].order or 0)[:1]


def _start(expected: Expected, at: int) -> Start | None:
    return expected.starts[at] if at < len(expected.starts) else None


def _equal(found: Summary, expected: Start | None) -> bool:
    """Return whether a tensor equals its expected start within four unit roundoffs of its dtype.

    The tolerance lets weights of one seed match although the run stores them in another dtype.
    """
    if found.start is None or expected is None:
        return found.start is None and expected is None
    limit = 4.0 * unit_roundoff(found.dtype)
    return all(error <= limit for error in differences(found.start, expected).values())


def differences(found: Start, expected: Start) -> Mapping[str, float]:
    """Relative differences of ``rms``, ``mean`` and ``amax`` of two tensors; the mean's is relative to the RMS."""
    scale = max(found.rms, expected.rms)
    if scale == 0.0:
        return {"rms": 0.0, "mean": 0.0, "amax": 0.0}
    return {
        "rms": abs(found.rms - expected.rms) / scale,
        "mean": abs(found.mean - expected.mean) / scale,
        "amax": abs(found.amax - expected.amax) / (max(found.amax, expected.amax) + _TAIL * scale),
    }


def deviations(pairing: Pairing, at: int, growth: float) -> Iterator[Deviation]:
    """The deviation of every checked tensor of the first step, in execution order, from the baseline's start ``at``.

    ``growth`` is the factor by which rounding errors may grow between modules.
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
    """By module, the unit roundoff of the narrowest dtype among its tensors in the baseline, at least float32's."""
    units: dict[tuple[str, str], float] = {}
    for key, _, expected in tensors:
        place = (key[0], key[1])
        units[place] = max(units.get(place, _SINGLE), unit_roundoff(expected.dtype))
    return units
