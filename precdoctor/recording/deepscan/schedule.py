"""Which steps are scanned: the first two, then ever farther apart, and those that recorded numbers give reason for.

Where the first ones trained nothing, as long as a loss scale is too large, others make up for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any, Final

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.evidence import Evidence

#: Scans of a process when nobody says how many: steps 0, 1, 8, 64, 512 and 4096.
DEFAULT_SCANS: Final = 6
#: Scans whose cost nobody asks about: a smoke run, or a GAN with its two optimizers, is to have them whole.
_FREE: Final = 2
#: Host time that scans may take in all whatever the budget, in ns: half a second is no cost to anybody, and small
#: models would never be scanned beyond their first two steps.
GRANT_NS: Final = 500 * 10**6
#: From the third scan on, distances grow by this factor.
_FACTOR: Final = 8
#: Scans for a reason that already had one: at most so many, within the budget, the first no sooner than this many steps
#: after the last one for that reason, each further one ``_FACTOR`` times later.
_MAX_REPEATED, _COOL_DOWN = 4, 64
#: Tensors of the same reason of which each may claim one of those; and scans of discarded steps in a row.
_MAX_PLACES, _MAX_DISCARDED = 64, 2
#: Scans that confirm what one scan alone has seen, whatever the budget, and how many steps after it.
_MAX_CONFIRMING, _CONFIRM_AFTER = 2, 7
#: Steps whose evidence waits to be looked into.
_MAX_WAITING: Final = 8


class Schedule:
    """Pure counting: it knows no tensors and no clock.

    Attributes:
        done: scans so far, those on evidence included.
        off: no step will be scanned at all.
        why: of the last scan that was wanted: ``reason`` (first | spaced | evidence) and ``evidence``.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._scans = DEFAULT_SCANS if options.deep_scan is None else options.deep_scan
        self.off = self._scans == 0
        self.done = 0
        #: Regular scans so far, and steps from the first one to the next one.
        self._regular = self._next = 0
        #: Scans that make up for one, so far, and whether the next step is to be one.
        self._made_up, self._makes_up = 0, False
        self.why: dict[str, Any] = {}
        #: Per reason: scans so far, and the step of the last one.
        self._claims: dict[str, tuple[int, int]] = {}
        self._places: set[tuple[str, str]] = set()
        self._repeated = 0
        self._waiting: list[Evidence] = []
        self._scanned: set[int] = set()
        self._first: int | None = None
        #: Scans that have seen the facts of one place, and the scan that is to be confirmed from a step on.
        self._facts: Counter[Hashable] = Counter()
        self._confirm: tuple[int, Evidence] | None = None
        self._confirming = 0

    def make_up(self) -> None:
        """Scans have shown no finite gradient, and now a step has had some: the next one makes up for them."""
        self._makes_up = not self.off and self._made_up < _FREE

    def found(self, step: int, places: Collection[Hashable]) -> None:
        """A scan is over: what only this one has seen so far is to be confirmed by another one.

        Args:
            step: that it has scanned.
            places: kinds and places of the facts that it has found.
        """
        self._facts.update(places)
        new = any(self._facts[place] == 1 for place in places)
        if new and self._confirming < _MAX_CONFIRMING:
            self._confirm = step + _CONFIRM_AFTER, Evidence("fact", step)
        elif not any(n == 1 for n in self._facts.values()):
            self._confirm = None

    def arm(self, evidence: Evidence) -> None:
        """Have the next step scanned if the evidence has a claim: its reason is new, or has cooled down."""
        if self.off or len(self._waiting) >= _MAX_WAITING or evidence.step in self._scanned:
            return  # the step was scanned already
        self._waiting.append(evidence)

    def _claim(self, step: int, *, affords: bool) -> list[Evidence]:
        """The evidence that has a claim on this step; the rest is forgotten."""
        waiting, self._waiting = self._waiting, []
        new = [e for e in waiting if e.what not in self._claims]
        again = [e for e in waiting if e.what in self._claims and self._may_repeat(e, step)]
        if not new and (not affords or self._repeated >= _MAX_REPEATED):
            again = [e for e in again if e.what == "discarded"]
        if not new and again and again[0].what != "discarded":
            self._repeated += 1
        for evidence in (*new, *again):
            self._claims[evidence.what] = (self._claims.get(evidence.what, (0, 0))[0] + 1, step)
            if len(self._places) < _MAX_PLACES:
                self._places.add((evidence.what, evidence.tensor))
        return new + again

    def _may_repeat(self, evidence: Evidence, step: int) -> bool:
        claims, last = self._claims[evidence.what]
        if evidence.what == "discarded":
            return claims < _MAX_DISCARDED
        if evidence.tensor and (evidence.what, evidence.tensor) in self._places:
            return False
        return step - last >= int(_COOL_DOWN * _FACTOR ** (claims - 1))

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
        if self._waiting and (found := self._claim(step, affords=self._affords(spent_ns, elapsed_ns))):
            return self._scan(step, "evidence", found)
        if self._confirm is not None and step >= self._confirm[0]:
            (_, evidence), self._confirm = self._confirm, None
            self._confirming += 1
            return self._scan(step, "evidence", [evidence])
        if self._makes_up:
            self._made_up, self._makes_up = self._made_up + 1, False
            return self._scan(step, "first", [])
        if self._regular >= self._scans or step - self._first < self._next:
            return False
        if not self._affords(spent_ns, elapsed_ns):
            return False
        self._regular += 1
        self._next = offset(self._regular)
        return self._scan(step, "first" if self._regular <= _FREE else "spaced", [])

    def _scan(self, step: int, reason: str, found: list[Evidence]) -> bool:
        self.done += 1
        self._scanned.add(step)
        self.why = {"reason": reason, **({"evidence": [e.as_data() for e in found]} if found else {})}
        return True

    def _affords(self, spent_ns: int, elapsed_ns: int) -> bool:
        """Whether one more scan like the ones before stays within the budget, where there is one, or the grant."""
        if self._options.deep_scan is not None or self._options.every is not None or self.done < _FREE:
            return True
        return spent_ns * (self.done + 1) / self.done <= max(self._options.budget * elapsed_ns, GRANT_NS)


def offset(number: int) -> int:
    """Steps from the first scan to the one of this number: 0, 1, 8, 64, 512 ..."""
    return number if number < _FREE else int(_FACTOR ** (number - 1))
