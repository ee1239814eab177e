"""Finds learning rates that rose far above all before them, per parameter group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from precdoctor.diagnosis.survey.step_facts import StepFacts

#: Times all rates before from which a learning rate has jumped: the ``rate_factor`` of PD605.
JUMP = 4.0
#: Fewest earlier rates to compare with; a warm-up begins with a few small ones.
_FEWEST = 4
#: Updates before the first step that is out of line in which a jump explains it: its effect takes a step or two.
_RECENT = 3
#: Steps whose rates give the usual level; longer would ignore a schedule.
_LEVEL = 32


def jump_before(steps: Sequence[StepFacts], until: int) -> int | None:
    """Index of the first jump of a rate, in any parameter group, among the updates just before ``until``."""
    series = _rates(steps)
    for i in range(max(_FEWEST, until - _RECENT - 1), until):
        for rates in series:
            before, rate = [r for r in rates[:i] if r], rates[i]
            if len(before) >= _FEWEST and rate and rate >= JUMP * max(before):
                return i
    return None


def _rates(steps: Sequence[StepFacts]) -> list[list[float | None]]:
    """Learning rates by step, per parameter group; the optimizer's one rate if the number of groups changes."""
    counts = {len(s.lrs) for s in steps}
    if len(counts) != 1 or counts == {0}:
        return [[s.lr for s in steps]]
    return [[r if math.isfinite(r) else None for r in group] for group in zip(*(s.lrs for s in steps), strict=True)]


def raised(steps: Sequence[StepFacts], at: int) -> tuple[float, float] | None:
    """The learning rate before, and the one at ``at``, if it is ``JUMP`` times the median of those before.

    With several parameter groups, those of the group that rose most.
    """
    found = _raised(steps, at)
    return found[1:] if found is not None else None


def raised_group(steps: Sequence[StepFacts], at: int) -> int | None:
    """Number of the parameter group that :func:`raised` reports; None if there is one group."""
    found = _raised(steps, at)
    return found[0] if found is not None and len(_rates(steps)) > 1 else None


def _raised(steps: Sequence[StepFacts], at: int) -> tuple[int, float, float] | None:
    found = []
    for group, rates in enumerate(_rates(steps)):
        before, present = [r for r in rates[max(0, at - _LEVEL) : at] if r], rates[at]
        if len(before) >= _FEWEST and present and present >= JUMP * median(before):
            found.append((group, max(before) if present >= JUMP * max(before) else median(before), present))
    return max(found, key=lambda f: f[2] / f[1], default=None)


def of_group(group: int | None) -> str:
    """`` of parameter group 1``; empty for None."""
    return f" of parameter group {group}" if group is not None else ""
