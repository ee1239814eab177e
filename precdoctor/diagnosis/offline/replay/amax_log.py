"""Amax of every tensor at every step: the one thing a replay of scales keeps of each row of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, keys, magnitudes, with_exponents
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.numerics.cast_counts import HistogramTable

_KEY = ("root", "module", "kind", "name")
#: Rows whose histograms are held at a time.
_AT_ONCE = 1 << 14
Key = tuple[str, str, str, str]


@dataclass(frozen=True, eq=False)
class AmaxLog:
    """Amax by tensor and step, calls and ranks together: the one thing kept of every row.

    Attributes:
        keys: the tensors.
        bounds: entries ``bounds[i]:bounds[i + 1]`` are those of tensor i, by step.
    """

    keys: list[Key]
    bounds: Ints
    steps: Ints
    amax: Floats
    non_finite: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, view: RunView, kinds: Sequence[str], wanted: Callable[[str], bool] | None) -> AmaxLog:
        """Of the kept rows; ``wanted`` says which modules are asked about, None: all."""
        frame = view.measured((), kinds, columns=("amax", "nan", "pos_inf"))
        left_out, tensors = set(vectors(view)), groups(frame, _KEY)
        found = [key[:4] for key in keys(frame.iloc[firsts(tensors)])]
        asked = np.array([key not in left_out and (wanted is None or wanted(key[1])) for key in found], dtype=np.bool_)
        mine = asked[tensors]
        code, frame = (np.cumsum(asked) - 1)[tensors[mine]], frame[mine]
        if not len(frame):
            nothing = np.zeros(0, dtype=np.int64)
            return cls([], np.zeros(1, dtype=np.int64), nothing, np.zeros(0), np.zeros(0, dtype=np.bool_))
        steps, amax = frame["step"].to_numpy(), magnitudes(frame)
        bad = ((frame["nan"] > 0) | (frame["pos_inf"] > 0)).to_numpy()  # -inf alone is a mask
        order = np.lexsort((steps, code))
        code, steps, amax, bad = code[order], steps[order], amax[order], bad[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(code) != 0) | (np.diff(steps) != 0)])
        code = code[starts]
        return cls(
            [key for key, chosen in zip(found, asked, strict=True) if chosen],
            np.searchsorted(code, np.arange(int(asked.sum()) + 1)),
            steps[starts],
            np.fmax.reduceat(amax, starts),
            np.logical_or.reduceat(bad, starts),
        )

    @cached_property
    def numbers(self) -> Ints:
        """Every step there is, in order."""
        return np.unique(self.steps)

    @cached_property
    def _places(self) -> Ints:
        """Tensor and step of every entry as one increasing number."""
        owner = np.repeat(np.arange(len(self.keys)), np.diff(self.bounds))
        places: Ints = owner * self.numbers.size + np.searchsorted(self.numbers, self.steps)
        return places

    def rows_of(self, code: Ints, steps: Ints) -> Ints:
        """The entries of tensors ``code`` at ``steps``, which must be there."""
        wanted = code * self.numbers.size + np.searchsorted(self.numbers, steps)
        found: Ints = np.searchsorted(self._places, wanted)
        return found


def vectors(view: RunView) -> Iterator[Key]:
    """Biases and gains: parameters that are no operands of a matrix product."""
    for process in view.processes:
        for root in view.facts(process).get("roots") or ():
            for parameter in root.get("parameters") or ():
                if len(parameter.get("shape") or ()) == 1:
                    yield text(root.get("name")), text(parameter.get("module")), "weight", text(parameter.get("name"))


def exponents_of(view: RunView, kinds: Sequence[str], log: AmaxLog) -> Iterator[tuple[HistogramTable, Ints, Ints]]:
    """Histograms of some thousand rows at a time, their entries in the amax log, and their tensors."""
    frame = view.measured((), kinds, columns=("amax", "exp_lo", "exp_hist"))
    known, tensors = {key: i for i, key in enumerate(log.keys)}, groups(frame, _KEY)
    code = np.array([known.get(key[:4], -1) for key in keys(frame.iloc[firsts(tensors)])], dtype=np.int64)[tensors]
    used = np.flatnonzero((code >= 0) & with_exponents(frame))
    for rows in np.split(used, np.arange(_AT_ONCE, used.size, _AT_ONCE)) if used.size else ():
        some = frame.iloc[rows]
        table = HistogramTable.of(histograms(some), magnitudes(some))
        yield table, log.rows_of(code[rows], some["step"].to_numpy()), code[rows]
