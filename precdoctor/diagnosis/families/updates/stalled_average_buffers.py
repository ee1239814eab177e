"""PD507, buffers: 16-bit counts and running statistics of norms that are still written to and no longer change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precdoctor.diagnosis.survey.frames import Ints, courses, finite
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.parameters import HALF
from precdoctor.diagnosis.survey.rows import Parameter, known_format, text
from precdoctor.diagnosis.survey.view import Process, RunView

_COLUMNS = ("module_class", "dtype", "numel", "nan", "pos_inf", "neg_inf", "amax", "sum", "amin_nonzero", "fingerprint")
#: Running statistics of torch's norms, each with its partner in the same norm.
_PARTNER = {"running_var": "running_mean", "running_mean": "running_var"}


@dataclass(frozen=True)
class Buffer:
    """A buffer on the recorded steps, ascending, before which the script had written to it.

    Attributes:
        prints, mean, amax: fingerprint, mean and largest magnitude on each step.
        counts: whether all elements are equal whole numbers, as in a count, on every step.
    """

    dtype: str
    module_class: str
    numel: int
    process: Process
    steps: Ints
    prints: npt.NDArray[Any]
    mean: Floats
    amax: Floats
    counts: bool

    @property
    def value(self) -> float:
        """Largest magnitude on the last step."""
        return float(self.amax[-1])

    @property
    def changes(self) -> Ints:
        """Indices into ``steps`` of the writes that changed a bit."""
        return np.flatnonzero(self.prints[1:] != self.prints[:-1]) + 1

    @property
    def idle(self) -> int:
        """Number of recorded writes since the last one that changed a bit."""
        return int(self.steps.size - 1 - self.changes.max(initial=0))

    @property
    def last_change(self) -> int:
        """Step of the last write that changed a bit; the first step if none did."""
        return int(self.steps[-1 - self.idle])

    def is_swamped_count(self) -> bool:
        """Return whether the count rose with every write until half an ulp was one term, and stays there.

        A sum of ones stalls at 2^(m+1), m the stored bits of the significand: 256 in BF16, 2048 in FP16; a sum of terms
        d at d times as much. Several additions between two recorded steps look like one larger rise, so both one and
        the smallest rise are tried as the term.
        """
        fmt = known_format(self.dtype)
        rises = np.diff(self.mean[: self.steps.size - self.idle])
        if fmt is None or rises.size < 2 or rises.min() <= 0.0 or not self.counts:
            return False
        stalls = 2.0 ** (fmt.mantissa_bits + 1)
        return self.value in (stalls, stalls * rises.min())


def stalled_counts(view: RunView, min_writes: float) -> Mapping[Parameter, Buffer]:
    """Return 16-bit counts that stalled for lack of bits, and have not moved for ``min_writes`` writes."""
    return {p: b for p, b in _survey(view).items() if b.idle >= min_writes and b.is_swamped_count()}


def running_statistics(view: RunView, min_writes: float) -> Mapping[Parameter, Buffer]:
    """Return running means and variances with ``min_writes`` writes or more whose partner in the same norm changes.

    With a momentum of 0, or in evaluation, neither of the two would change.
    """
    buffers = _survey(view)
    found = {}
    for (root, module, name), buffer in buffers.items():
        partner = buffers.get((root, module, _PARTNER.get(name, "")))
        if partner is not None and partner.changes.size and buffer.steps.size > min_writes:
            found[root, module, name] = buffer
    return found


def _survey(view: RunView) -> Mapping[Parameter, Buffer]:
    """Return all 16-bit buffers, each from the first process that recorded it; read once per view."""
    return view.remember("narrow-buffers", lambda: _read(view))


def _read(view: RunView) -> dict[Parameter, Buffer]:
    """Read all rows of 16-bit buffers that have a fingerprint and finite elements."""
    frame = view.measured((), ("buffer",), columns=_COLUMNS, where=[("dtype", "in", HALF)])
    frame = frame[finite(frame) & frame[["fingerprint", "sum", "amax"]].notna().all(axis=1)]
    steps, prints, amax = (frame[c].to_numpy() for c in ("step", "fingerprint", "amax"))
    mean = column(frame, "sum") / np.maximum(column(frame, "numel"), 1.0)
    equal = (amax == 0.0) | (column(frame, "amin_nonzero") == amax)
    counts = equal & (amax == np.trunc(amax))
    return {
        place: Buffer(dtype, text(module_class), max(1, numel), process, steps[own], prints[own], mean[own], amax[own],
                      bool(counts[own].all()))
        for place, process, (dtype, module_class, numel), own in courses(frame, ("dtype", "module_class", "numel"))
    }  # fmt: skip
