"""The gradients of every scaler update: the loss scale from which they overflow, and the share flushed at any scale.

Three kinds of evidence, from strong to weak: whether the update overflowed at its own scale; on sampled steps, amax and
exponents of every recorded gradient; between samples, the L2 norm of all weight gradients, which bounds their amax from
both sides. Values in a log include the loss scale; here it is divided out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from precdoctor.diagnosis.offline.replay.updates import Update, updates_of
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, magnitudes
from precdoctor.diagnosis.survey.measures import format_values
from precdoctor.diagnosis.survey.view import Process, RunView, remembered
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram
from precdoctor.numerics.step_gradients import OverflowLimit, StepGradients

KINDS = ("grad_output", "weight_grad")
#: Most sampled updates whose exponents are kept, evenly spread: the flushed share changes slowly. Bounds the memory.
HISTOGRAMS = 1024

_MODULE = ("root", "module")
_COLUMNS = ("dtype", "numel", "zero", "amax", "exp_lo", "exp_hist", "scale")


@dataclass(frozen=True, eq=False)
class RunGradients:
    """The gradients of one process, one entry per scaler update.

    Attributes:
        updates: the run's own updates.
        gradients: for each update the overflow limit and exponents, which hold for any loss scale.
        hypothetical: whether no gradient of the run was in ``format``, so that all are treated as if they were.
        sampled: number of updates with recorded gradients.
        bounded: number of updates without, but with a gradient norm.
    """

    process: Process
    updates: tuple[Update, ...]
    gradients: tuple[StepGradients, ...]
    format: Format
    hypothetical: bool
    sampled: int
    bounded: int


def run_gradients(view: RunView, process: Process, fmt: Format = FP16) -> RunGradients:
    """Return the gradients of one process over the kept steps.

    Gradients are in ``fmt`` if their row has that dtype, or if another gradient of their module has it: autocast
    computes wider weight gradients in it. If there are none, all gradients are treated as if they were in ``fmt``.

    Rows of other ranks of the same attempt are also used: after the reduction, one rank's overflow is that of all.
    """
    updates = updates_of(view, process)
    frame = view.measured(("non_finite",), KINDS, columns=_COLUMNS)
    found = _Evidence(updates, fmt, frame[frame["attempt"] == process.attempt], _modules_in(view, fmt))
    sampled = int(np.count_nonzero(found.seen))
    bounded = sum(u.grad_norm is not None and not s for u, s in zip(updates, found.seen, strict=True))
    return RunGradients(process, tuple(updates), tuple(found.gradients()), fmt, found.hypothetical, sampled, bounded)


@remembered
def _modules_in(view: RunView, fmt: Format) -> frozenset[tuple[str, str]]:
    """Return the modules with a gradient in ``fmt``."""
    frame = view.measured((), KINDS, where=[("dtype", "==", fmt.dtype)])
    return frozenset(_modules(frame.iloc[firsts(groups(frame, _MODULE))]))


def _modules(frame: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(*(frame[c].tolist() for c in _MODULE), strict=True))


class _Evidence:
    """The rows of each update: a few numbers for each, and exponents of at most :data:`HISTOGRAMS`.

    Args:
        frame: rows of the ``tensors`` table.
        narrow: modules with a gradient in ``fmt``; without any, all rows count as in it.
    """

    def __init__(
        self, updates: Sequence[Update], fmt: Format, frame: pd.DataFrame, narrow: frozenset[tuple[str, str]]
    ) -> None:
        self._updates = updates
        self._format = fmt
        n = len(updates)
        self._ends = np.array([u.last for u in updates], dtype=np.int64)
        self._firsts = np.array([u.step for u in updates], dtype=np.int64)
        self._scales = np.array([1.0 if u.scale is None else u.scale for u in updates])
        #: Largest unscaled amax of gradients: the least that those whose dtype is the format may have had before they
        #: were rounded to it; of all gradients as recorded, wider ones relative to their own range.
        self._sure, self._likely = np.full(n, math.nan), np.full(n, math.nan)
        #: Number of elements of all weight gradients, over which the norm was taken.
        self._weights = np.zeros(n)
        self.seen = np.zeros(n, dtype=np.bool_)
        self._narrow_weights = True
        sampled = [i for i, u in enumerate(updates) if u.sampled and not u.overflow and u.scale != 0.0]
        kept = sampled[:: max(1, math.ceil(len(sampled) / HISTOGRAMS))]
        self._slot = np.full(n, -1, dtype=np.int64)
        self._slot[kept] = np.arange(len(kept))
        self._counts = np.zeros((len(kept), EXP_MAX - EXP_MIN + 1), dtype=np.int64)
        self._zeros = np.zeros(len(kept), dtype=np.int64)
        self._add(frame, narrow)
        # without rows, a loss scale implies FP16
        self.hypothetical = not narrow and (bool(self.seen.any()) or all(u.scale is None for u in updates))

    def _add(self, frame: pd.DataFrame, narrow: frozenset[tuple[str, str]]) -> None:
        at = np.searchsorted(self._ends, frame["step"].to_numpy())
        known = at < self._ends.size
        known[known] &= self._firsts[at[known]] <= frame["step"].to_numpy()[known]
        frame, at = frame[known], at[known]
        if not len(at):
            return
        scale = frame["scale"].to_numpy(dtype=np.float64, na_value=math.nan)
        scale = np.where(
            (scale > 0.0) & np.isfinite(scale), scale, np.where(self._scales[at] > 0.0, self._scales[at], 1.0)
        )
        stored = magnitudes(frame)
        stored[self._scales[at] == 0.0] = math.nan  # a scale of 0 flushed all of it
        amax = stored / scale
        own = (frame["dtype"] == self._format.dtype).to_numpy() | (not narrow)
        modules = groups(frame, _MODULE)
        held = own | np.array([m in narrow for m in _modules(frame.iloc[firsts(modules)])])[modules]
        # ratio of the overflow limits of each row's own dtype and of the format, at least 1
        limits = np.fmax(format_values(frame, "overflow_limit") / self._format.overflow_limit, 1.0)
        np.fmax.at(self._sure, at[own], _least_rounded_to(stored[own], self._format) / scale[own])
        np.fmax.at(self._likely, at, np.where(held, amax, amax / limits))
        self.seen[at] = True
        weights = (frame["kind"] == "weight_grad").to_numpy()
        np.add.at(self._weights, at[weights], frame["numel"].to_numpy()[weights])
        self._narrow_weights = bool(own[weights].all())
        whole = held & (frame["non_finite"] == 0).to_numpy() & (scale == self._scales[at]) & (self._slot[at] >= 0)
        if whole.any():
            slot, held = self._slot[at[whole]], histograms(frame[whole])
            np.add.at(self._zeros, slot, frame["zero"].to_numpy()[whole])
            np.add.at(self._counts, (slot[held.whose], held.bins - EXP_MIN), held.counts)

    def gradients(self) -> list[StepGradients]:
        """Return the gradients of each update, in order."""
        out = []
        for i, (update, limit) in enumerate(zip(self._updates, self._limits(), strict=True)):
            slot = self._slot[i]
            exponents = ExponentHistogram(EXP_MIN, self._counts[slot]).trimmed() if slot >= 0 else None
            out.append(
                StepGradients(
                    update.step,
                    limit,
                    exponents if exponents is not None and exponents.total else None,
                    int(self._zeros[slot]) if slot >= 0 else 0,
                    float(self._scales[i]) or 1.0,
                    self._format,
                    rounded=not self.hypothetical,
                )
            )
        return out

    def _limits(self) -> list[OverflowLimit]:
        """Return the overflow limit of each update, corrected by whether it overflowed at its own scale."""
        ratio = self._norm_to_amax()
        weights = float(np.max(self._weights, initial=0.0))
        base = [self._limit(i, u, ratio, weights) for i, u in enumerate(self._updates)]
        near = _nearest([math.inf if u.overflow else b.estimate for u, b in zip(self._updates, base, strict=True)])
        course = zip(self._updates, base, near.tolist(), strict=True)
        return [self._with_observation(*one) for one in course]

    def _with_observation(self, update: Update, limit: OverflowLimit, neighbour: float) -> OverflowLimit:
        """Correct an overflow limit by the update's own outcome; ``neighbour``: that of the nearest clean update."""
        scale = update.scale if update.scale is not None else 1.0
        if update.forward and scale < 2.0**64:  # at larger scales the scaled loss itself may exceed FP32
            return OverflowLimit.always()
        if self.hypothetical and update.scale is None:
            return OverflowLimit.always() if update.overflow else limit
        if update.overflow and neighbour <= scale:  # finite values of an overflowed update are less reliable
            limit = replace(limit, estimate=min(limit.estimate, max(neighbour, limit.clean_up_to)))
        return limit.observed(scale, overflow=update.overflow)

    def _limit(self, i: int, update: Update, ratio: float | None, weights: float) -> OverflowLimit:
        """Return the overflow limit from tensors and norms alone, whether or not the update overflowed."""
        norm = update.grad_norm
        if self.seen[i] and not math.isnan(self._likely[i]):
            likely = OverflowLimit.of_amax(float(self._likely[i]), self._format)
            if self.hypothetical:
                return likely
            sure = self._sure[i]
            high = math.inf if math.isnan(sure) else OverflowLimit.of_amax(float(sure), self._format).overflows_from
            return OverflowLimit(0.0, high, min(likely.estimate, high))
        if not norm or self.seen[i]:
            return OverflowLimit.unknown()
        # amax is at least the root mean square, of numbers that may have been rounded up
        low = norm / math.sqrt(weights) * (1.0 - self._format.ulp_at_one / 2.0) if weights > 0.0 else 0.0
        high = OverflowLimit.of_amax(low, self._format).overflows_from if self._narrow_weights else math.inf
        middle = ratio * norm if ratio is not None else math.sqrt(low * norm) or norm
        return OverflowLimit(0.0, high, min(OverflowLimit.of_amax(middle, self._format).estimate, high))

    def _norm_to_amax(self) -> float | None:
        """Return the median ratio of amax to gradient norm over the sampled updates; None without one."""
        norms = np.array([u.grad_norm or math.nan for u in self._updates])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self._likely / norms
        usable = ratios[np.isfinite(ratios) & (ratios > 0.0)]
        return float(np.median(usable)) if usable.size else None


def _least_rounded_to(values: Floats, fmt: Format) -> Floats:
    """Return the smallest magnitudes that round to ``values``, magnitudes in ``fmt``: half an ulp below them.

    At another scale that is no power of two times this one, such a number is rounded elsewhere.
    """
    mantissa, exponent = np.frexp(values)
    ulp = np.ldexp(fmt.ulp_at_one, exponent - np.where(mantissa == 0.5, 2, 1))
    return np.where(values > 0.0, values - np.fmax(ulp, fmt.min_subnormal) / 2.0, values)


def _nearest(limits: Sequence[float]) -> Floats:
    """Replace each entry by the nearest finite one (the earlier of two); all become Inf if there is none."""
    values = np.array(limits)
    known = np.flatnonzero(np.isfinite(values))
    if known.size == 0:
        return np.full(values.size, math.inf)
    at = np.arange(values.size)
    after = np.clip(np.searchsorted(known, at), 0, known.size - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.where(np.abs(known[before] - at) <= np.abs(known[after] - at), known[before], known[after])
    return values[nearer]
