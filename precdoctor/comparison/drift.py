"""How far paired tensors moved: in binades, per tensor, over the common steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from precdoctor.comparison.renames import Module, translate
from precdoctor.diagnosis.survey.rows import Key, TensorRow
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.histogram import ExponentHistogram

_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "shape", "numel", "order"),
    *("nan", "pos_inf", "neg_inf", "zero", "amax", "sum_sq", "exp_lo", "exp_hist", "scale"),
)
_KINDS = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "weight_grad_step", "update")
_STEPS_AT_ONCE = 8
#: A tensor has moved when its exponents lie this far apart, in binades, on two sampled steps in a row (or the last).
MOVED = 0.5
#: Added for small tensors, over the root of their size: log2|x| of a Gaussian deviates by pi / (2 sqrt(2) ln 2) = 1.6
#: binades, so two samples of n elements of one distribution lie about 1.8 / sqrt(n) apart.
_CHANCE = 4.0


@dataclass
class Drift:
    """One tensor in both runs, over the common sampled steps.

    Attributes:
        distance: per step the distance of the two exponent distributions; see :func:`distance_in_binades`.
        amax: per step log2 of the second run's amax over the first's, loss scales taken out.
        rms: the same of the root mean square.
        zeros: per step the difference of the shares of zeros, second minus first.
    """

    key: Key
    dtypes: tuple[str, str]
    order: int | None
    numel: int
    steps: list[int] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)
    amax: list[float] = field(default_factory=list)
    rms: list[float] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)

    @property
    def moved_at(self) -> int | None:
        """The step from which on it has moved; None when it never did for more than a moment."""
        limit = MOVED + _CHANCE / math.sqrt(max(1, self.numel))
        far = [d > limit for d in self.distance]
        for at, here in enumerate(far):
            if here and (at + 1 == len(far) or far[at + 1]):
                return self.steps[at]
        return None

    @property
    def typical(self) -> float:
        """The median distance over the steps, in binades."""
        return median(self.distance) if self.distance else 0.0

    @property
    def largest(self) -> float:
        """The largest distance, in binades."""
        return max(self.distance, default=0.0)

    @property
    def amax_binades(self) -> float | None:
        """The median change of amax, in binades."""
        return median(self.amax) if self.amax else None

    @property
    def second_moment_ratio(self) -> float | None:
        """The median of E[x^2] of the second run over that of the first."""
        return float(2.0 ** (2.0 * median(self.rms))) if self.rms else None

    @property
    def zero_share(self) -> float | None:
        """The median change of the share of zeros."""
        return median(self.zeros) if self.zeros else None


def distance_in_binades(a: ExponentHistogram, b: ExponentHistogram, shift: int = 0) -> float | None:
    """How far apart two exponent distributions lie: the 1-Wasserstein (earth mover's) distance over binary exponents.

    Scaling all elements by 2**k moves it by exactly ``|k|``. Zeros and non-finite elements do not take part.

    Args:
        shift: binades by which ``b`` is moved before.

    Returns:
        Binades; None when either holds nothing.
    """
    if a.total == 0 or b.total == 0:
        return None
    lo = min(a.lo, b.lo + shift)
    hi = max(a.lo + len(a.counts), b.lo + shift + len(b.counts))
    first, second = np.zeros(hi - lo), np.zeros(hi - lo)
    first[a.lo - lo : a.lo - lo + len(a.counts)] = a.counts / a.total
    second[b.lo + shift - lo : b.lo + shift - lo + len(b.counts)] = b.counts / b.total
    return float(np.abs(np.cumsum(first - second))[:-1].sum())


def drifts(a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module]) -> list[Drift]:
    """Every tensor of both runs, those that moved most first.

    Args:
        steps: common steps that both runs sampled.
        names: modules of ``b`` that go by another name in ``a``.
    """
    found: dict[Key, Drift] = {}
    for at in range(0, len(steps), _STEPS_AT_ONCE):
        window = steps[at : at + _STEPS_AT_ONCE]
        ours = {(r.step, r.rank, r.phase, r.key): r for r in _rows(a, window)}
        theirs = {(r.step, r.rank, r.phase, translate(r.key, names)): r for r in _rows(b, window)}
        for identity in sorted(ours.keys() & theirs.keys(), key=lambda i: (i[0], i[1])):
            first, second = ours[identity], theirs[identity]
            key = identity[3]
            drift = found.setdefault(key, Drift(key, (first.dtype, second.dtype), first.order, first.numel))
            _add(drift, first, second)
    return sorted(found.values(), key=lambda d: (-d.typical, -d.largest, d.key))


def _rows(view: RunView, steps: Sequence[int]) -> Iterator[TensorRow]:
    for record in view.scan_records(_COLUMNS, _KINDS, steps=steps):
        row = TensorRow.of(record)
        facts = view.step_facts(Process(row.rank, row.attempt), row.step)
        skipped = facts is not None and facts.skipped and "grad" in row.kind
        if row.phase != "recompute" and not skipped:
            yield row


def _add(drift: Drift, a: TensorRow, b: TensorRow) -> None:
    unscale = _binades_of(a.scale) - _binades_of(b.scale)
    distance = distance_in_binades(a.histogram, b.histogram, round(unscale))
    if distance is None:
        return
    if drift.steps and drift.steps[-1] == a.step:  # another rank: the worse one counts
        drift.distance[-1] = max(drift.distance[-1], distance)
        return
    drift.steps.append(a.step)
    drift.distance.append(distance)
    drift.zeros.append(b.zero / b.numel - a.zero / a.numel if a.numel and b.numel else 0.0)
    if a.amax and b.amax:
        drift.amax.append(math.log2(b.amax / a.amax) + unscale)
    if a.rms and b.rms:
        drift.rms.append(math.log2(b.rms / a.rms) + unscale)


def _binades_of(scale: float | None) -> float:
    return math.log2(scale) if scale is not None and 0.0 < scale < math.inf else 0.0
