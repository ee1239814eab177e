"""How far the results of an op go that a module repeats in a pass: a recurrence, an iteration, layers in a loop.

Inside one call of a module nothing else sees them: not the rows of its outputs, and not those of its calls.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any, Final

from precdoctor.recording.deepscan.scan_facts import Event, Findings
from precdoctor.recording.deepscan.scanned_op import Call, Counts

#: Runs of an op that make a course, and at most so many are kept; ops of a pass.
_FEWEST, _MOST, _MAX_OPS = 8, 4096, 4096
#: Growth from the first to the last in binades, and share of the steps between them that go up, of a fact. As PD604's
#: lowest limits are. And the share of the growth that the newer half has: of a factor a half, of a sum next to nothing.
_GROWTH, _RISING, _NEWER = 6.5, 0.75, 0.25
#: Points of a course that are logged.
_POINTS: Final = 16


class Repeats:
    """Courses of the amax of results, by op, line and micro-step.

    Args:
        findings: where a fact goes (``repeated``): ``calls``, and up to 16 points of its course in ``amax``.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._courses: dict[tuple[Any, ...], array[float]] = {}
        self._events: dict[tuple[Any, ...], Event] = {}

    def note(self, call: Call, counts: Counts) -> None:
        """One result more; zeros and results without a finite element are left out."""
        if not counts.amax:
            return
        where = call.where
        key = (where.root, where.module, call.phase, call.op, where.line, call.micro_step)
        course = self._courses.get(key)
        if course is None:
            if len(self._courses) >= _MAX_OPS:
                return
            course = self._courses[key] = array("d")
        if len(course) < _MOST:
            course.append(counts.amax)
        if len(course) == _FEWEST:
            self._events[key] = self._findings.event_of(call)

    def finish(self) -> None:
        """Once the scan is over."""
        for key, event in self._events.items():
            course = self._courses[key]
            rising = sum(b > a for a, b in itertools.pairwise(course)) / (len(course) - 1)
            grown, newer = (math.log2(course[-1] / course[i]) for i in (0, len(course) // 2))
            if grown >= _GROWTH and rising >= _RISING and newer >= _NEWER * grown:
                step = (len(course) - 1) / (_POINTS - 1) if len(course) > _POINTS else 1.0
                points = [course[round(i * step)] for i in range(min(_POINTS, len(course)))]
                self._findings.add_event("repeated", event, grown, calls=len(course), rising=rising, amax=points)
