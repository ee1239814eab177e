"""Finds jumps of the learning rate, per parameter group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from precdoctor.diagnosis.survey.step_facts import StepFacts

#: Times all earlier rates from which a learning rate has jumped: the ``rate_factor`` of PD605.
JUMP = 4.0
#: Fewest earlier rates to compare with; a warm-up begins with a few small ones.
_FEWEST = 4
#: Most updates between a jump and the first step out of line that it explains: its effect takes a step or two.
_RECENT = 3
#: Number of steps whose rates give the usual level; with more, a schedule would distort it.
_LEVEL = 32


def jump_before(steps: Sequence[StepFacts], until: int) -> int | None:
    """Return the index of the first jump of a rate, in any parameter group, on the few steps before index ``until``.

    None without a jump.
    """
    series = _rates(steps)
    for i in range(max(_FEWEST, until - _RECENT - 1), until):
        for rates in series:
            before, rate = [r for r in rates[:i] if r], rates[i]
            if len(before) >= _FEWEST and rate and rate >= JUMP * max(before):
                return i
    return None


def _rates(steps: Sequence[StepFacts]) -> list[list[float | None]]:
    """Return the rates of each parameter group by step; only the optimizer's ``lr`` if groups change or are unknown."""
    counts = {len(s.lrs) for s in steps}
    if len(counts) != 1 or counts == {0}:
        return [[s.lr for s in steps]]
    return [[r if math.isfinite(r) else None for r in group] for group in zip(*(s.lrs for s in steps), strict=True)]


class Rise(NamedTuple):
    """A learning rate that rose; ``what``: ``learning rate``, with its parameter group if there are several."""

    before: float
    to: float
    what: str


def rise_at(steps: Sequence[StepFacts], at: int) -> Rise | None:
    """Return the rise of the learning rate at ``steps[at]`` to ``JUMP`` times the median before; None without one.

    With several parameter groups, that of the group that rose most.
    """
    series, found = _rates(steps), []
    for group, rates in enumerate(series):
        before, present = [r for r in rates[max(0, at - _LEVEL) : at] if r], rates[at]
        if len(before) >= _FEWEST and present and present >= JUMP * median(before):
            usual = max(before) if present >= JUMP * max(before) else median(before)
            of = f" of parameter group {group}" if len(series) > 1 else ""
            found.append(Rise(usual, present, f"learning rate{of}"))
    return max(found, key=lambda rise: rise.to / rise.before, default=None)
