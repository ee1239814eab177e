"""Where a learning rate was raised out of line with all before it: of each parameter group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from precdoctor.diagnosis.survey.step_facts import StepFacts

#: A learning rate this far above all before it is a jump (as PD605's ``rate_factor``).
JUMP = 4.0
#: Rates before it, the fewest.
_FEWEST = 4
#: Updates back from the first step that is out of line, among which a jump of the rate is to blame.
_BLAMED = 3


def jump_before(steps: Sequence[StepFacts], until: int) -> int | None:
    """Index of a rate far above all before it, in any group, among the updates just before ``until``."""
    series = _rates(steps)
    for i in range(max(_FEWEST, until - _BLAMED - 1), until):
        for rates in series:
            before, rate = [r for r in rates[:i] if r], rates[i]
            if len(before) >= _FEWEST and rate and rate >= JUMP * max(before):
                return i
    return None


def _rates(steps: Sequence[StepFacts]) -> list[list[float | None]]:
    """Learning rates step by step: of each parameter group, where their number stays the same."""
    counts = {len(s.lrs) for s in steps}
    if len(counts) != 1 or counts == {0}:
        return [[s.lr for s in steps]]
    return [[r if math.isfinite(r) else None for r in group] for group in zip(*(s.lrs for s in steps), strict=True)]


def raised(steps: Sequence[StepFacts], at: int) -> tuple[float, float] | None:
    """The learning rate before, and the one in force at ``at``, where it is four times the median of those before.

    Of several parameter groups the one whose rate rose most.
    """
    found = _raised(steps, at)
    return found[1:] if found is not None else None


def raised_group(steps: Sequence[StepFacts], at: int) -> int | None:
    """Number of the parameter group whose rate :func:`raised` is about; None where there is one group."""
    found = _raised(steps, at)
    return found[0] if found is not None and len(_rates(steps)) > 1 else None


def _raised(steps: Sequence[StepFacts], at: int) -> tuple[int, float, float] | None:
    found = []
    for group, rates in enumerate(_rates(steps)):
        before, present = [r for r in rates[max(0, at - 32) : at] if r], rates[at]
        if len(before) >= _FEWEST and present and present >= JUMP * median(before):
            found.append((group, max(before) if present >= JUMP * max(before) else median(before), present))
    return max(found, key=lambda f: f[2] / f[1], default=None)


def of_group(group: int | None) -> str:
    """`` of parameter group 1``; empty for None."""
    return f" of parameter group {group}" if group is not None else ""
