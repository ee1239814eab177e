"""Evidence for deep scans: compares each sampled row with the last rows of its tensor, each step with the last steps.

Runs on the thread that writes the log, once per step, with a few numpy operations over its rows. Memory per tensor is
constant. No threshold here decides whether something is wrong: they only choose which step to scan.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from precdoctor.numerics.arrays import Bools, Floats, Ints

#: Largest finite numbers.
_MAXIMA: Final = {"float16": 65504.0, "bfloat16": 3.3895e38}
#: Minimum rows before a tensor has a range to compare with, and minimum steps for a number of the step.
_FEWEST: Final = 4
#: Binades outside of the recent range that count; chosen empirically: a batch moves an amax by less than one.
_OUTSIDE: Final = 3.0
#: Binades per row by which a range shrinks towards its tensor's recent values.
_FORGET: Final = 0.125
#: Rise of the share of zeros (absolute) that counts, and minimum elements of the tensor.
_ZEROS, _ELEMENTS = 0.25, 16
#: Rise of a learning rate over all earlier ones (as PD605's ``rate_factor``).
_RATE: Final = 4.0
#: A loss counts if it exceeds its recent range by this many times the range's width, and is at least twice as large.
_LOSS: Final = 3.0
#: Consecutive falls of the loss scale that count; and steps for which a scale must be held to become a reference level.
_FALLS, _HELD = 3, 8
#: Number of recent losses and norms remembered, and of optimizers.
_RECENT, _MAX_OPTIMIZERS = 16, 16
#: Maximum pieces of evidence per step.
_MAX_NAMED: Final = 8

_ACTIVATIONS: Final = frozenset({"input", "output", "batch", "buffer", "weight"})
_RANGED: Final = _ACTIVATIONS | {"grad_output", "weight_grad"}
_ZEROABLE: Final = frozenset({"input", "output", "grad_output", "weight_grad"})


class Readings(NamedTuple):
    """The columns of one step's rows that the watcher reads.

    Attributes:
        slots: slot of each row's tensor, without repetition.
        kinds, dtypes: as in the log.
        amax: largest finite magnitudes as stored, 0 without a finite element.
        zeros: shares of zeros.
        numel: numbers of elements.
    """

    slots: Ints
    kinds: npt.NDArray[np.str_]
    dtypes: npt.NDArray[np.str_]
    amax: Floats
    zeros: Floats
    numel: Ints


@dataclass(frozen=True)
class Evidence:
    """One reason for a deep scan.

    Attributes:
        what: amax | zeros | squares | headroom | loss-scale | learning-rate | loss | grad-norm | clipped-norm |
            discarded | fact (found by the scan of that step, to be confirmed).
        step: the step that shows it.
        tensor: ``root/module:kind:name``; empty for numbers of the step.
        before, now: the number's earlier and its new value.
    """

    what: str
    step: int
    before: float | None = None
    now: float | None = None
    tensor: str = ""
    #: Slot of the tensor, until ``tensor`` is set.
    slot: int = -1

    def as_data(self) -> dict[str, Any]:
        """Return the evidence as data of the ``scan`` event."""
        tensor = {"tensor": self.tensor} if self.tensor else {}
        return {"what": self.what, "step": self.step, **tensor, "before": self.before, "now": self.now}


class _OptimizerHistory:
    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_RECENT)
        self.norms: deque[float] = deque(maxlen=_RECENT)
        self.rate, self.rates = 0.0, 0


class Watcher:
    """Remembers recent numbers of each tensor and optimizer, and finds those of a new step that deviate from them."""

    def __init__(self) -> None:
        #: Per slot: rows seen; then lower and upper end of the exponent of amax, largest share of zeros, largest amax.
        self._seen: Ints = np.zeros(0, np.int64)
        self._state: Floats = np.zeros((4, 0))
        self._optimizers: dict[str, _OptimizerHistory] = {}
        #: Whether weights have FP16 gradients; and the largest gradient norm of a clipped step.
        self._half, self._clipped = False, 0.0
        self._scale: float | None = None
        self._floor = math.inf  # the lowest scale held so far
        self._held = self._falls = 0

    # --- rows --------------------------------------------------------------------------------------------------------

    def of_rows(self, step: int, rows: Readings, scale: float | None) -> list[Evidence]:
        """Return the evidence in the rows of a sampled step.

        ``scale``: loss scale that the gradients carry; None without one.
        """
        if not len(rows.slots):
            return []
        self._make_room(int(rows.slots.max()))
        slots, kinds, amax = rows.slots, rows.kinds, rows.amax
        ranged = self._seen[slots] >= _FEWEST
        low, high, zeros, largest = self._state[:, slots]
        factor = scale if scale is not None and 0.0 < scale < math.inf else 1.0
        gradient = np.isin(kinds, ("grad_output", "weight_grad"))
        self._half |= bool(((kinds == "weight_grad") & (rows.dtypes == "float16")).any())
        with np.errstate(all="ignore"):
            exponent = np.log2(np.where(gradient, amax / factor, amax))
        has_exponent = np.isfinite(exponent)
        comparable = ranged & has_exponent & np.isin(kinds, tuple(_RANGED))
        # Gradients shrink as a run learns, so only growth counts; vanishing ones show in the zeros.
        out_of_range = comparable & ((exponent > high + _OUTSIDE) | (~gradient & (exponent < low - _OUTSIDE)))
        emptied = ranged & np.isin(kinds, tuple(_ZEROABLE)) & (rows.numel >= _ELEMENTS) & (rows.zeros > zeros + _ZEROS)
        with np.errstate(all="ignore"):
            range_end = np.exp2(np.where(exponent > high, high, low)) * np.where(gradient, factor, 1.0)
        limit = np.select([rows.dtypes == name for name in _MAXIMA], list(_MAXIMA.values()), math.inf)
        seen_activation = (self._seen[slots] > 0) & np.isin(kinds, tuple(_ACTIVATIONS))

        def crosses(level: Floats) -> Bools:
            return seen_activation & (amax > level) & (largest <= level)

        found: list[Evidence] = []
        for what, which, before, now in (
            ("squares", crosses(np.sqrt(limit)), largest, amax),
            ("headroom", crosses(limit / 2.0), largest, amax),
            ("zeros", emptied, zeros, rows.zeros),
            ("amax", out_of_range, range_end, amax),
        ):
            if which.any():
                row = int(np.flatnonzero(which)[0])  # rows are in order of execution: later ones follow from the first
                found.append(Evidence(what, step, float(before[row]), float(now[row]), slot=int(slots[row])))
        self._remember(slots, exponent, has_exponent, rows)
        return found[:_MAX_NAMED]

    def _make_room(self, last: int) -> None:
        """Extend the state so that it has slot ``last``."""
        if last < len(self._seen):
            return
        more = 2 * (last + 1) - len(self._seen)
        self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        fresh = np.array([math.inf, -math.inf, 0.0, 0.0])
        self._state = np.concatenate([self._state, np.repeat(fresh[:, None], more, axis=1)], axis=1)

    def _remember(self, slots: Ints, exponent: Floats, has_exponent: Bools, rows: Readings) -> None:
        self._seen[slots] += 1
        low, high, zeros, largest = self._state[:, slots]
        self._state[0, slots] = np.where(has_exponent, np.minimum(low + _FORGET, exponent), low)
        self._state[1, slots] = np.where(has_exponent, np.maximum(high - _FORGET, exponent), high)
        self._state[2, slots] = np.fmax(zeros, rows.zeros)
        self._state[3, slots] = np.fmax(largest, rows.amax)

    # --- numbers of the step -----------------------------------------------------------------------------------------

    def of_step(self, row: dict[str, Any]) -> list[Evidence]:
        """Return the evidence in a steps row."""
        step, name = int(row["step"]), str(row.get("optimizer") or "")
        found = self._of_scale(step, _finite(row.get("loss_scale")))
        numbers = self._optimizers.get(name)
        if numbers is None:
            if len(self._optimizers) >= _MAX_OPTIMIZERS:
                return found
            numbers = self._optimizers[name] = _OptimizerHistory()
        loss, norm, rate = (_finite(row.get(key)) for key in ("loss", "grad_norm", "lr"))
        if rate is not None and rate > 0.0:
            if numbers.rates >= _FEWEST and rate >= _RATE * numbers.rate:
                found.append(Evidence("learning-rate", step, numbers.rate, rate))
            numbers.rate, numbers.rates = max(rate, numbers.rate), numbers.rates + 1
        if norm is not None and norm > 0.0:
            top = max(numbers.norms, default=math.inf)
            if len(numbers.norms) >= _FEWEST and norm / 2.0**_OUTSIDE >= top:
                found.append(Evidence("grad-norm", step, top, norm))
            numbers.norms.append(norm)
            found += self._of_clipping(step, norm, row)
        if loss is not None:
            top, low = max(numbers.losses, default=math.inf), min(numbers.losses, default=0.0)
            if len(numbers.losses) >= _FEWEST and loss - top > max(_LOSS * (top - low), abs(top)):
                found.append(Evidence("loss", step, top, loss))
            numbers.losses.append(loss)
        return found

    def _of_clipping(self, step: int, norm: float, row: dict[str, Any]) -> list[Evidence]:
        """Find the first norm beyond FP16's maximum: clipping computes the norm of FP16 gradients in FP16.

        ``norm`` is without the loss scale, which gradients still carry if they are clipped before they are unscaled.
        """
        if not self._half or row.get("clip_norm") is None:
            return []
        norm *= (_finite(row.get("loss_scale")) or 1.0) if row.get("clipped_before_unscale") else 1.0
        before, self._clipped = self._clipped, max(self._clipped, norm)
        crosses = before <= _MAXIMA["float16"] < norm
        return [Evidence("clipped-norm", step, before, norm)] if crosses else []

    def _of_scale(self, step: int, scale: float | None) -> list[Evidence]:
        """Find a third fall of the loss scale in a row, or a first one below every scale held for some steps."""
        last, self._scale = self._scale, scale if scale is not None else self._scale
        if scale is None or last is None:
            return []
        self._held = self._held + 1 if scale == last else 0
        if self._held >= _HELD:
            self._floor = min(self._floor, scale)
        if scale >= last:
            self._falls = 0 if scale > last or self._held > 1 else self._falls
            return []
        self._falls += 1
        if self._falls == _FALLS or (scale < self._floor < math.inf and self._falls == 1):
            return [Evidence("loss-scale", step, last, scale)]
        return []


def _finite(value: Any) -> float | None:
    return value if type(value) is float and math.isfinite(value) else None
