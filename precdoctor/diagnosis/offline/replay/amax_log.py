"""The amax of every tensor at every step, from which replays of FP8 recipes compute scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, keys, magnitudes
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Bools, Floats, Ints
from precdoctor.numerics.histogram import Histograms

#: Columns of a tensor over all calls.
KEY = ("root", "module", "kind", "name")
#: Number of rows whose histograms are in memory at a time.
_AT_ONCE = 1 << 14
Key = tuple[str, str, str, str]


@dataclass(frozen=True, eq=False)
class AmaxLog:
    """The amax of each tensor at each step, the largest over calls and ranks, in arrays with one entry for each.

    Attributes:
        bounds: entries ``bounds[i]:bounds[i + 1]`` are those of tensor i, sorted by step.
        amax: of each entry; NaN if unknown.
        non_finite: whether any row of the entry held a NaN or +Inf.
    """

    keys: list[Key]
    bounds: Ints
    steps: Ints
    amax: Floats
    non_finite: Bools

    @classmethod
    def read(cls, view: RunView, kinds: Sequence[str], wanted: Callable[[str], bool] | None) -> AmaxLog:
        """Read the kept rows of these kinds without biases and gains; ``wanted`` selects modules, None means all."""
        frame = view.measured((), kinds, columns=("amax", "nan", "pos_inf"))
        tensors = groups(frame, KEY)
        found = [key[:4] for key in keys(frame.iloc[firsts(tensors)])]
        chosen = selected(view, found, wanted)
        mine = chosen[tensors]
        code, frame = (np.cumsum(chosen) - 1)[tensors[mine]], frame[mine]
        if not len(frame):
            nothing = np.zeros(0, dtype=np.int64)
            return cls([], np.zeros(1, dtype=np.int64), nothing, np.zeros(0), np.zeros(0, dtype=np.bool_))
        steps, amax = frame["step"].to_numpy(), magnitudes(frame)
        bad = ((frame["nan"] > 0) | (frame["pos_inf"] > 0)).to_numpy()  # a tensor with only -inf is a mask
        order = np.lexsort((steps, code))
        code, steps, amax, bad = code[order], steps[order], amax[order], bad[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(code) != 0) | (np.diff(steps) != 0)])
        code = code[starts]
        return cls(
            [found[i] for i in np.flatnonzero(chosen)],
            np.searchsorted(code, np.arange(int(chosen.sum()) + 1)),
            steps[starts],
            np.fmax.reduceat(amax, starts),
            np.logical_or.reduceat(bad, starts),
        )

    @cached_property
    def numbers(self) -> Ints:
        """All steps, ascending."""
        return np.unique(self.steps)

    @cached_property
    def _places(self) -> Ints:
        """One number for tensor and step of each entry, ascending."""
        owner = np.repeat(np.arange(len(self.keys)), np.diff(self.bounds))
        return owner * self.numbers.size + np.searchsorted(self.numbers, self.steps)

    def rows_of(self, code: Ints, steps: Ints) -> Ints:
        """Return the entry numbers of tensors ``code`` at ``steps``; each must exist."""
        wanted = code * self.numbers.size + np.searchsorted(self.numbers, steps)
        return np.searchsorted(self._places, wanted)


def selected(view: RunView, tensors: Sequence[Key], wanted: Callable[[str], bool] | None) -> Bools:
    """Mask of the tensors of wanted modules, without biases and gains, which are no operands of a matrix product."""
    known = (one for process in view.processes for one in recorded_parameters(view, process))
    vectors = {
        (root, module, "weight", name)
        for (root, module, name), parameter in known
        if len(parameter.get("shape") or ()) == 1
    }
    return np.array([key not in vectors and (wanted is None or wanted(key[1])) for key in tensors], dtype=np.bool_)


def exponents_of(view: RunView, kinds: Sequence[str], log: AmaxLog) -> Iterator[tuple[Histograms, Floats, Ints, Ints]]:
    """Yield histograms and amax of some thousand rows at a time, and each row's entry and tensor number in ``log``."""
    frame = view.measured((), kinds, columns=("amax", "exp_lo", "exp_hist"))
    known, tensors = {key: i for i, key in enumerate(log.keys)}, groups(frame, KEY)
    code = np.array([known.get(key[:4], -1) for key in keys(frame.iloc[firsts(tensors)])], dtype=np.int64)[tensors]
    held = (frame["exp_hist"].notna() & frame["exp_lo"].notna()).to_numpy()
    used = np.flatnonzero((code >= 0) & held)
    for rows in np.split(used, np.arange(_AT_ONCE, used.size, _AT_ONCE)) if used.size else ():
        some = frame.iloc[rows]
        yield histograms(some), magnitudes(some), log.rows_of(code[rows], some["step"].to_numpy()), code[rows]
