"""How far paired tensors moved: in binades, per tensor, over the common steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.comparison.paired_rows import Module, paired
from precdoctor.comparison.steps import clean_rows
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, largest
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.histogram import EXP_MAX, Histograms

_MEASURES = ("zero_share", "rms", "multiplier")
_COLUMNS = ("phase", "dtype", "order", "numel", "amax", "exp_lo", "exp_hist")
_KINDS = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "weight_grad_step", "update")
_STEPS_AT_ONCE = 8
#: A tensor has moved when its exponents lie this far apart, in binades, on two sampled steps in a row (or the last).
MOVED = 0.5
#: Added for small tensors, over the root of their size: log2|x| of a Gaussian deviates by pi / (2 sqrt(2) ln 2) = 1.6
#: binades, so two samples of n elements of one distribution lie about 1.8 / sqrt(n) apart.
_CHANCE = 4.0


@dataclass(frozen=True, eq=False)
class Drift:
    """One tensor in both runs, over the common sampled steps.

    Attributes:
        steps: on which both hold an element that is finite and not zero, shape ``(steps,)``.
        distance: of the two exponent distributions; see :func:`distances`.
        amax: log2 of the second run's amax over the first's, loss scales taken out; NaN where one is zero.
        rms: the same of the root mean square.
        zeros: the difference of the shares of zeros, second minus first.
    """

    key: Key
    dtypes: tuple[str, str]
    order: int | None
    numel: int
    steps: Ints
    distance: Floats
    amax: Floats
    rms: Floats
    zeros: Floats

    @property
    def moved_at(self) -> int | None:
        """The step from which on it has moved; None when it never did for more than a moment."""
        limit = MOVED + _CHANCE / math.sqrt(max(1, self.numel))
        far = np.append(self.distance > limit, True)
        moved = self.steps[far[:-1] & far[1:]]
        return int(moved[0]) if moved.size else None

    @property
    def typical(self) -> float:
        """The median distance over the steps, in binades."""
        return _median(self.distance) or 0.0

    @property
    def largest(self) -> float:
        """The largest distance, in binades."""
        return float(self.distance.max(initial=0.0))

    @property
    def amax_binades(self) -> float | None:
        """The median change of amax, in binades."""
        return _median(self.amax)

    @property
    def second_moment_ratio(self) -> float | None:
        """The median of E[x^2] of the second run over that of the first; no larger than FP64 can say."""
        middle = _median(self.rms)
        return None if middle is None else float(2.0 ** min(2.0 * middle, 1023.0))

    @property
    def zero_share(self) -> float | None:
        """The median change of the share of zeros."""
        return _median(self.zeros)


def _median(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else None


def distances(first: Histograms, second: Histograms, shift: Ints) -> Floats:
    """How far apart two exponent distributions lie: the 1-Wasserstein (earth mover's) distance over binary exponents.

    Scaling all elements by 2**k moves it by exactly ``|k|``. Zeros and non-finite elements do not take part.

    Args:
        first, second: of as many tensors each.
        shift: binades by which those of ``second`` are moved before, shape ``(tensors,)``.

    Returns:
        Binades, shape ``(tensors,)``; NaN where either holds nothing.
    """
    sides = ((first, first.bins, 1.0), (second, second.bins + shift[second.whose], -1.0))
    low = min(int(bins.min(initial=EXP_MAX)) for _, bins, _ in sides)
    apart = np.zeros((shift.size, max(int(bins.max(initial=low)) for _, bins, _ in sides) - low + 1))
    for histograms_, bins, sign in sides:
        apart[histograms_.whose, bins - low] += (
            sign * histograms_.counts / np.maximum(histograms_.total, 1)[histograms_.whose]
        )
    last = apart.shape[1] - 1 - (apart[:, ::-1] != 0.0).argmax(axis=1)
    running = np.abs(np.cumsum(apart, axis=1))
    running[np.arange(apart.shape[1]) >= last[:, None]] = 0.0  # rounding alone is left there
    known = (first.total > 0) & (second.total > 0)
    return np.where(known, running.sum(axis=1), np.nan)


def drifts(a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module]) -> list[Drift]:
    """Every tensor of both runs, those that moved most first.

    Args:
        steps: common steps that both runs sampled.
        names: modules of ``b`` that go by another name in ``a``.
    """
    known: dict[Key, int] = {}
    windows = [steps[at : at + _STEPS_AT_ONCE] for at in range(0, len(steps), _STEPS_AT_ONCE)]
    parts = [_compared(a, b, window, names, known) for window in windows]
    compared = pd.concat(parts, ignore_index=True)
    found = _drifts(compared, list(known))
    return sorted(found, key=lambda d: (-d.typical, -d.largest, d.key))


def _compared(
    a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module], known: dict[Key, int]
) -> pd.DataFrame:
    """One row per pair of tensors, with its number in ``known``."""
    first, second = _rows(a, steps), _rows(b, steps)
    pairs = paired(first, second, names)
    numbers = np.array([known.setdefault(key, len(known)) for key in pairs.keys], np.int64)
    first, second = first.iloc[pairs.first].reset_index(drop=True), second.iloc[pairs.second].reset_index(drop=True)
    unscale = np.log2(first["multiplier"]) - np.log2(second["multiplier"])
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = {c: np.log2(column(second, c) / column(first, c)) + unscale for c in ("amax", "rms")}
    found: pd.DataFrame = pd.DataFrame(
        {
            "tensor": numbers[pairs.tensor],
            "step": first["step"],
            "distance": distances(histograms(first), histograms(second), np.rint(unscale).to_numpy(np.int64)),
            "zeros": (second["zero_share"] - first["zero_share"]).fillna(0.0),
            **{name: values.where(np.isfinite(values)) for name, values in moved.items()},
            "dtype_a": first["dtype"].astype(str),
            "dtype_b": second["dtype"].astype(str),
            "order": first["order"],
            "numel": first["numel"],
        }
    )
    return found


def _rows(view: RunView, steps: Sequence[int]) -> pd.DataFrame:
    frame = view.measured(_MEASURES, _KINDS, columns=_COLUMNS, steps=steps)
    clean: pd.DataFrame = frame[clean_rows(view, frame)]
    return clean


def _drifts(compared: pd.DataFrame, keys: Sequence[Key]) -> Iterator[Drift]:
    """One drift per tensor; of several ranks at one step the largest distance counts, the rest is the first's."""
    held = compared[compared["distance"].notna()]
    points = groups(held, ("tensor", "step"))
    course = held.iloc[firsts(points)].assign(distance=largest(points, held["distance"]))
    course = course.sort_values("tensor", kind="stable")
    bounds = np.searchsorted(course["tensor"], np.arange(1, len(keys)))
    columns = ("step", "distance", "amax", "rms", "zeros")
    per_tensor = list(zip(*(np.split(course[c].to_numpy(), bounds) for c in columns), strict=True))
    first = compared.drop_duplicates("tensor")
    described = (first[c].tolist() for c in ("tensor", "dtype_a", "dtype_b", "order", "numel"))
    for number, a, b, order, numel in zip(*described, strict=True):
        yield Drift(keys[number], (a, b), None if math.isnan(order) else int(order), numel, *per_tensor[number])
