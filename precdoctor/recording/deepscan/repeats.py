"""Detects growth over repetitions of an op within one module call: a recurrence, an iteration, layers in a loop.

Rows of module outputs do not show it.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any, Final

from precdoctor.recording.deepscan.scan_facts import Event, Findings
from precdoctor.recording.deepscan.scanned_op import Call, Counts

#: Fewest repetitions of an op that are judged, most that are kept, and maximum number of ops followed.
_FEWEST, _MOST, _MAX_OPS = 8, 4096, 4096
#: Limits of a fact: growth from first to last in binades, share of increases (the lowest limits of PD604), and share of
#: the growth in the newer half. In exponential growth that share is a half, in a running sum next to nothing.
_GROWTH, _RISING, _NEWER = 6.5, 0.75, 0.25
#: Maximum number of amax values logged per op.
_POINTS: Final = 16


class Repeats:
    """Series of the results' amax, by op, line and micro-step."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._series: dict[tuple[Any, ...], array[float]] = {}
        self._events: dict[tuple[Any, ...], Event] = {}

    def note(self, call: Call, counts: Counts) -> None:
        """Add the amax of a result, unless it is zero or has no finite element."""
        if not counts.amax:
            return
        where = call.where
        key = (where.root, where.module, call.phase, call.op, where.line, call.micro_step)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= _MAX_OPS:
                return
            series = self._series[key] = array("d")
        if len(series) < _MOST:
            series.append(counts.amax)
        if len(series) == _FEWEST:
            self._events[key] = self._findings.event_of(call)

    def finish(self) -> None:
        """Note the series that grow, once the scan is over."""
        for key, event in self._events.items():
            series = self._series[key]
            rising = sum(b > a for a, b in itertools.pairwise(series)) / (len(series) - 1)
            grown, newer = (math.log2(series[-1] / series[i]) for i in (0, len(series) // 2))
            if grown >= _GROWTH and rising >= _RISING and newer >= _NEWER * grown:
                step = (len(series) - 1) / (_POINTS - 1) if len(series) > _POINTS else 1.0
                points = [series[round(i * step)] for i in range(min(_POINTS, len(series)))]
                self._findings.add_event("repeated", event, grown, calls=len(series), rising=rising, amax=points)
