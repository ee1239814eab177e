"""Which steps are scanned: the first two, then ever farther apart, and after something suspicious."""

from __future__ import annotations

from typing import Final

from precdoctor.recording.options import RecordOptions

#: Scans of a process when nobody says how many: steps 0, 1, 8, 64, 512 and 4096.
DEFAULT_SCANS: Final = 6
#: Scans whose cost nobody asks about: a smoke run, or a GAN with its two optimizers, is to have them whole.
_FREE: Final = 2
#: From the third scan on, distances grow by this factor.
_FACTOR: Final = 8
#: Further scans because something looked suspicious.
_MAX_SUSPICIOUS: Final = 2


class Schedule:
    """Pure counting: it knows no tensors and no clock.

    Attributes:
        done: scans so far, those on suspicion included.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._scans = DEFAULT_SCANS if options.deep_scan is None else options.deep_scan
        self.done = 0
        self._regular = 0
        self._suspicious = 0
        self._suspected = False
        self._first: int | None = None

    @property
    def off(self) -> bool:
        """Whether no step will be scanned at all."""
        return self._scans == 0

    def suspect(self) -> None:
        """Something looks wrong: the next step is worth a look."""
        self._suspected = not self.off and self._suspicious < _MAX_SUSPICIOUS

    def wants(self, step: int, *, spent_ns: int, elapsed_ns: int) -> bool:
        """Whether the coming step is to be scanned.

        Args:
            step: its number.
            spent_ns: what the scans so far have cost.
            elapsed_ns: how long the run has been recorded.
        """
        first, last = self._options.steps
        if self.off or (first is not None and step < first) or (last is not None and step >= last):
            return False
        if self._first is None:
            self._first = step
        if self._suspected:
            self._suspected = False
            self._suspicious += 1
            self.done += 1
            return True
        if self._regular >= self._scans or step - self._first < offset(self._regular):
            return False
        if not self._affords(spent_ns, elapsed_ns):
            return False
        self._regular += 1
        self.done += 1
        return True

    def _affords(self, spent_ns: int, elapsed_ns: int) -> bool:
        """Whether one more scan like the ones before stays within the budget, where there is one."""
        if self._options.deep_scan is not None or self._options.every is not None or self.done < _FREE:
            return True
        return spent_ns * (self.done + 1) / self.done <= self._options.budget * elapsed_ns


def offset(number: int) -> int:
    """Steps from the first scan to the one of this number: 0, 1, 8, 64, 512 ..."""
    return number if number < _FREE else int(_FACTOR ** (number - 1))
