"""Measures how far the exponent distribution of each paired tensor moved between two runs, in binades, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.comparison.paired_rows import Module, pair_rows
from precdoctor.comparison.steps import KINDS, clean_rows
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, largest
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.histogram import EXP_MAX, Histograms

_MEASURES = ("zero_share", "rms", "multiplier")
_COLUMNS = ("dtype", "order", "numel", "amax", "exp_lo", "exp_hist")
_STEPS_AT_ONCE = 8
#: A tensor has moved if its exponents are this far apart, in binades, on two sampled steps in a row (or the last one).
MOVED = 0.5
#: Divided by sqrt(numel) and added to :data:`MOVED`, because small tensors differ by chance: log2|x| of a Gaussian has
#: standard deviation pi / (2 sqrt(2) ln 2) = 1.6 binades, so two samples of n elements lie about 1.8 / sqrt(n) apart.
_CHANCE = 4.0


@dataclass(frozen=True, eq=False)
class Drift:
    """How far one tensor moved between the runs, on each common sampled step. Arrays have shape ``(steps,)``.

    Attributes:
        dtypes: in the first and in the second run.
        order: place in the execution order of the first run; None if unknown.
        steps: the steps on which the tensor has a finite non-zero element in both runs.
        distance: distance of the two exponent distributions, in binades; see :func:`distances`.
        amax: log2(amax in the second run / amax in the first), loss scales removed; NaN if either is zero.
        rms: log2 of the ratio of the root mean squares, likewise.
        zeros: share of zeros in the second run minus that in the first.
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
        """The first of two consecutive sampled steps with a distance above :data:`MOVED`, or the last sampled step if
        only that one is; None if the tensor has not moved.
        """
        limit = MOVED + _CHANCE / math.sqrt(max(1, self.numel))
        far = np.append(self.distance > limit, True)
        steps_apart = self.steps[far[:-1] & far[1:]]
        return int(steps_apart[0]) if steps_apart.size else None

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
        """The median of E[x^2] in the second run over E[x^2] in the first, at most 2^1023; None if unknown."""
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
    """The 1-Wasserstein (earth mover's) distance of the exponent distributions of pairs of tensors.

    Scaling all elements of one tensor by 2**k gives distance ``|k|``. Zeros and non-finite elements are ignored.

    Args:
        first, second: histograms of equally many tensors.
        shift: binades to add to the exponents of ``second`` before comparing, shape ``(tensors,)``.

    Returns:
        Distances in binades, shape ``(tensors,)``; NaN if either histogram is empty.
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
    running[np.arange(apart.shape[1]) >= last[:, None]] = 0.0  # beyond the last bin only rounding errors are left
    known = (first.total > 0) & (second.total > 0)
    return np.where(known, running.sum(axis=1), np.nan)


def drifts(a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module]) -> list[Drift]:
    """The drift of every tensor that both runs have, on the ``steps`` that both sampled, largest first.

    ``names`` are renamed modules, ``module in b -> module in a``.
    """
    known: dict[Key, int] = {}
    windows = [steps[at : at + _STEPS_AT_ONCE] for at in range(0, len(steps), _STEPS_AT_ONCE)]
    parts = [_compared_rows(a, b, window, names, known) for window in windows]
    compared = pd.concat(parts, ignore_index=True)
    all_drifts = _drifts(compared, list(known))
    return sorted(all_drifts, key=lambda d: (-d.typical, -d.largest, d.key))


def _compared_rows(
    a: RunView, b: RunView, steps: Sequence[int], names: Mapping[Module, Module], known: dict[Key, int]
) -> pd.DataFrame:
    """One row per pair of rows, with the tensor's number in ``known``, to which new tensors are added."""
    ours, theirs = (clean_rows(view, _MEASURES, KINDS, _COLUMNS, steps) for view in (a, b))
    pairs = pair_rows(ours, theirs, names)
    first, second = pairs.first, pairs.second
    numbers = np.array([known.setdefault(key, len(known)) for key in pairs.keys], np.int64)
    unscale = np.log2(first["multiplier"]) - np.log2(second["multiplier"])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {c: np.log2(column(second, c) / column(first, c)) + unscale for c in ("amax", "rms")}
    return pd.DataFrame(
        {
            "tensor": numbers[pairs.tensor],
            "step": first["step"],
            "distance": distances(histograms(first), histograms(second), np.rint(unscale).to_numpy(np.int64)),
            "zeros": (second["zero_share"] - first["zero_share"]).fillna(0.0),
            **{name: values.where(np.isfinite(values)) for name, values in ratios.items()},
            "dtype_a": first["dtype"].astype(str),
            "dtype_b": second["dtype"].astype(str),
            "order": first["order"],
            "numel": first["numel"],
        }
    )


def _drifts(compared: pd.DataFrame, keys: Sequence[Key]) -> Iterator[Drift]:
    """One drift per tensor. Of several ranks on a step, the largest distance counts; other values are the first's."""
    valid = compared[compared["distance"].notna()]
    points = groups(valid, ("tensor", "step"))
    history = valid.iloc[firsts(points)].assign(distance=largest(points, valid["distance"]))
    history = history.sort_values("tensor", kind="stable")
    bounds = np.searchsorted(history["tensor"], np.arange(1, len(keys)))
    columns = ("step", "distance", "amax", "rms", "zeros")
    per_tensor = list(zip(*(np.split(history[c].to_numpy(), bounds) for c in columns), strict=True))
    first = compared.drop_duplicates("tensor")
    described = (first[c].tolist() for c in ("tensor", "dtype_a", "dtype_b", "order", "numel"))
    for number, a, b, order, numel in zip(*described, strict=True):
        yield Drift(keys[number], (a, b), None if math.isnan(order) else int(order), numel, *per_tensor[number])
