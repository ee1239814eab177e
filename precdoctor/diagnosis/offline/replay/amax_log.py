"""Amax of every tensor at every step: the one thing a replay of scales keeps of each row of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from precdoctor.diagnosis.survey.histogram_columns import magnitudes, with_exponents
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import BAD_COUNTS, RunView

_KEY = ("root", "module", "kind", "name")
_COLUMNS = (*_KEY, "amax", "numel", *BAD_COUNTS)
Key = tuple[str, str, str, str]
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AmaxLog:
    """Amax by tensor and step, calls and ranks together: the one thing kept of every row.

    Attributes:
        keys: the tensors.
        bounds: entries ``bounds[i]:bounds[i + 1]`` are those of tensor i, by step.
    """

    keys: list[Key]
    bounds: _Ints
    steps: _Ints
    amax: _Floats
    non_finite: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, view: RunView, kinds: Sequence[str], wanted: Callable[[str], bool] | None) -> AmaxLog:
        """Reads the log once; ``wanted`` says which modules are asked about, None: all."""
        numbers: dict[Key, int] = dict.fromkeys(vectors(view), -1)
        parts: list[tuple[_Ints, _Ints, _Floats, npt.NDArray[np.bool_]]] = []
        for frame in view.scan(_COLUMNS, kinds):
            code = _codes(frame, numbers, wanted)
            mine = code >= 0
            bad = ((frame["nan"] > 0) | (frame["pos_inf"] > 0)).to_numpy()  # -inf alone is a mask
            amax = magnitudes(frame)
            parts.append((code[mine], frame["step"].to_numpy()[mine], amax[mine], bad[mine]))
        keys = [key for key, number in numbers.items() if number >= 0]
        if not keys:
            nothing = np.zeros(0, dtype=np.int64)
            return cls([], np.zeros(1, dtype=np.int64), nothing, np.zeros(0), np.zeros(0, dtype=np.bool_))
        code, steps, amax, bad = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((steps, code))
        code, steps, amax, bad = code[order], steps[order], amax[order], bad[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(code) != 0) | (np.diff(steps) != 0)])
        code = code[starts]
        return cls(
            keys,
            np.searchsorted(code, np.arange(len(keys) + 1)),
            steps[starts],
            np.fmax.reduceat(amax, starts),
            np.logical_or.reduceat(bad, starts),
        )

    @cached_property
    def numbers(self) -> _Ints:
        """Every step there is, in order."""
        return np.unique(self.steps)

    @cached_property
    def _places(self) -> _Ints:
        """Tensor and step of every entry as one increasing number."""
        owner = np.repeat(np.arange(len(self.keys)), np.diff(self.bounds))
        places: _Ints = owner * self.numbers.size + np.searchsorted(self.numbers, self.steps)
        return places

    def rows_of(self, code: _Ints, steps: _Ints) -> _Ints:
        """The entries of tensors ``code`` at ``steps``, which must be there."""
        wanted = code * self.numbers.size + np.searchsorted(self.numbers, steps)
        found: _Ints = np.searchsorted(self._places, wanted)
        return found


def _codes(frame: pd.DataFrame, numbers: dict[Key, int], wanted: Callable[[str], bool] | None) -> _Ints:
    """The number of each row's tensor, new ones counted on; -1 for those not asked about."""
    local, unique = pd.MultiIndex.from_frame(frame[list(_KEY)]).factorize()
    for key in unique:
        if key not in numbers:
            asked = wanted is None or wanted(str(key[1]))
            numbers[key] = sum(n >= 0 for n in numbers.values()) if asked else -1
    out: _Ints = np.array([numbers[key] for key in unique], dtype=np.int64)[local]
    return out


def vectors(view: RunView) -> Iterator[Key]:
    """Biases and gains: parameters that are no operands of a matrix product."""
    for process in view.processes:
        for root in view.facts(process).get("roots") or ():
            for parameter in root.get("parameters") or ():
                if len(parameter.get("shape") or ()) == 1:
                    yield text(root.get("name")), text(parameter.get("module")), "weight", text(parameter.get("name"))


def exponents_of(view: RunView, kinds: Sequence[str], log: AmaxLog) -> Iterator[tuple[pd.DataFrame, _Ints, _Ints]]:
    """Batches of rows with exponents, their entries in the amax log, and their tensors."""
    numbers: dict[Key, int] = {key: i for i, key in enumerate(log.keys)}
    known = set(log.keys)
    for frame in view.scan([*_KEY, "amax", "exp_lo", "exp_hist"], kinds):
        local, unique = pd.MultiIndex.from_frame(frame[list(_KEY)]).factorize()
        code = np.array([numbers[key] if key in known else -1 for key in unique], dtype=np.int64)[local]
        used = (code >= 0) & with_exponents(frame)
        if used.any():
            chosen = frame[used]
            yield chosen, log.rows_of(code[used], chosen["step"].to_numpy()), code[used]
