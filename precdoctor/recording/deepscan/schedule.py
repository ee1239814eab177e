"""Decides which steps are scanned: the first two, then ever farther apart, and steps for which there is evidence.

If the first scans saw no gradients that trained (a loss scale that begins too large), later scans make up for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any, Final

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.evidence import Evidence

#: Default number of scheduled scans: steps 0, 1, 8, 64, 512 and 4096.
DEFAULT_SCANS: Final = 6
#: Scans made whatever they cost: a smoke run, or a GAN with two optimizers, needs them.
_FREE: Final = 2
#: Host time in ns that scans may take in total whatever the budget: half a second harms nobody, and without it small
#: models would never be scanned beyond their first two steps.
GRANT_NS: Final = 500 * 10**6
#: From the third scan on, distances grow by this factor.
_FACTOR: Final = 8
#: For reasons that already had a scan: maximum number of further scans (within the budget), and the fewest steps from
#: the last scan for the reason to its second; the distance grows by ``_FACTOR`` with each.
_MAX_REPEATED, _COOL_DOWN = 4, 64
#: Maximum number of (reason, tensor) pairs remembered: each pair causes one scan only. Maximum number of scans because
#: steps were discarded.
_MAX_PLACES, _MAX_DISCARDED = 64, 2
#: Maximum number of scans that confirm facts seen in one scan only, whatever the budget; and their distance in steps.
_MAX_CONFIRMING, _CONFIRM_AFTER = 2, 7
#: Maximum number of pieces of evidence that wait for a scan.
_MAX_WAITING: Final = 8


class Schedule:
    """Decides by counting alone, without tensors or a clock.

    Attributes:
        done: number of scans so far, including those on evidence.
        off: whether no step will be scanned at all.
        why: ``reason`` (first | spaced | evidence) and ``evidence`` of the last scan.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._scans = DEFAULT_SCANS if options.deep_scan is None else options.deep_scan
        self.off = self._scans == 0
        self.done = 0
        #: Number of scheduled scans so far; distance in steps from the first to the next one.
        self._regular = self._next = 0
        #: Number of make-up scans so far; whether the next step gets one.
        self._made_up, self._makes_up = 0, False
        self.why: dict[str, Any] = {}
        #: Per reason: number of scans so far, and step of the last one.
        self._claims: dict[str, tuple[int, int]] = {}
        self._places: set[tuple[str, str]] = set()
        self._repeated = 0
        self._waiting: list[Evidence] = []
        self._scanned: set[int] = set()
        self._first: int | None = None
        #: Number of scans that have found each fact; the step from which on a confirming scan is due, and its evidence.
        self._facts: Counter[Hashable] = Counter()
        self._confirm: tuple[int, Evidence] | None = None
        self._confirming = 0

    def make_up(self) -> None:
        """Have the next step scanned, twice at most: gradients are finite by now, and were not in the last scan."""
        self._makes_up = not self.off and self._made_up < _FREE

    def found(self, step: int, places: Collection[Hashable]) -> None:
        """Record kinds and places of a scan's facts; a new one is to be confirmed by another scan."""
        self._facts.update(places)
        new = any(self._facts[place] == 1 for place in places)
        if new and self._confirming < _MAX_CONFIRMING:
            self._confirm = step + _CONFIRM_AFTER, Evidence("fact", step)
        elif not any(n == 1 for n in self._facts.values()):
            self._confirm = None

    def arm(self, evidence: Evidence) -> None:
        """Have the next step scanned if the reason of the evidence is new, or its last scan is long enough ago."""
        if self.off or len(self._waiting) >= _MAX_WAITING or evidence.step in self._scanned:
            return  # the step was scanned already
        self._waiting.append(evidence)

    def _claim(self, step: int, *, affords: bool) -> list[Evidence]:
        """Return the evidence that justifies a scan of this step; forget the rest."""
        waiting, self._waiting = self._waiting, []
        new = [e for e in waiting if e.what not in self._claims]
        again = [e for e in waiting if e.what in self._claims and self._may_repeat(e, step)]
        if not new and (not affords or self._repeated >= _MAX_REPEATED):
            again = [e for e in again if e.what == "discarded"]
        if not new and any(e.what != "discarded" for e in again):
            self._repeated += 1
        for evidence in (*new, *again):
            self._claims[evidence.what] = (self._claims.get(evidence.what, (0, 0))[0] + 1, step)
            if len(self._places) < _MAX_PLACES:
                self._places.add((evidence.what, evidence.tensor))
        return new + again

    def _may_repeat(self, evidence: Evidence, step: int) -> bool:
        """Return whether evidence whose reason already had a scan may cause another one."""
        claims, last = self._claims[evidence.what]
        if evidence.what == "discarded":
            return claims < _MAX_DISCARDED
        if evidence.tensor and (evidence.what, evidence.tensor) in self._places:
            return False
        return step - last >= int(_COOL_DOWN * _FACTOR ** (claims - 1))

    def wants(self, step: int, *, spent_ns: int, elapsed_ns: int) -> bool:
        """Return whether to scan the coming step; a step it returns True for counts as scanned.

        Args:
            spent_ns: cost of the scans so far.
            elapsed_ns: time since the recording began.
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
        """Count a scan and note its reason; always True."""
        self.done += 1
        self._scanned.add(step)
        self.why = {"reason": reason, **({"evidence": [e.as_data() for e in found]} if found else {})}
        return True

    def _affords(self, spent_ns: int, elapsed_ns: int) -> bool:
        """Return whether one more scan of average cost stays within budget or grant; True if no budget applies."""
        if self._options.deep_scan is not None or self._options.every is not None or self.done < _FREE:
            return True
        return spent_ns * (self.done + 1) / self.done <= max(self._options.budget * elapsed_ns, GRANT_NS)


def offset(number: int) -> int:
    """Return the distance in steps from the first scheduled scan to the one of this number: 0, 1, 8, 64, 512 ..."""
    return number if number < _FREE else int(_FACTOR ** (number - 1))
