"""The size of each weight matrix and of its update, by step, over the sampled steps before an incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.divergence.learning_rates import JUMP
from precdoctor.diagnosis.survey.frames import finite, parameters
from precdoctor.diagnosis.survey.rows import Parameter
from precdoctor.diagnosis.survey.view import Process, RunView

#: Most sampled steps to read, the newest; a divergence takes fewer. Bounds the work.
_NEWEST = 64
#: RMS x sqrt(fan-in) below which a weight is almost zero, so that any update replaces it: the ``sized`` of PD504.
_SIZED = 0.2
#: Growth of a weight in one step from which its update is at least as large as the weight.
_DOUBLED = 2.0


@dataclass(frozen=True)
class Updates:
    """For each sampled step and weight matrix the RMS of the weight before the step, and of the stored update.

    Updates of the steps in ``bounded`` were not recorded: their RMS is the least that explains the weights after them.
    """

    weights: Mapping[int, Mapping[Parameter, float]]
    updates: Mapping[int, Mapping[Parameter, float]]
    bounded: frozenset[int] = frozenset()

    def bound_words(self, step: int) -> str:
        """`` at least`` if the updates of ``step`` are lower bounds, else empty."""
        return " at least" if step in self.bounded else ""

    def ratios(self, step: int) -> dict[Parameter, float]:
        """Return RMS of the update over RMS of the weight, for all matrices of the step."""
        weights = self.weights.get(step, {})
        return {p: u / weights[p] for p, u in self.updates.get(step, {}).items() if weights.get(p)}

    def ratio(self, step: int) -> float | None:
        """Return the largest ratio of a step; None if none was recorded."""
        return max(self.ratios(step).values(), default=None)

    def largest(self, first: int, end: int) -> tuple[float | None, str]:
        """Return the largest ratio of the first two recorded steps in ``[first, end)``, and its parameter.

        ``(None, "")`` if none was recorded.
        """
        steps = [s for s in sorted(self.updates) if first <= s < end and self.ratios(s)]
        nearest = steps[:2]  # the root's own update, or the next one
        found = [max((r, p) for p, r in self.ratios(s).items()) for s in nearest]
        worst = max(found, key=lambda f: f[0], default=None)
        return (None, "") if worst is None else (worst[0], parameter_label(worst[1]))

    def factors(self, step: int) -> list[float]:
        """Return the growth factor of each matrix's RMS from this step to the next, if both were recorded."""
        now, then = self.weights.get(step, {}), self.weights.get(step + 1, {})
        return [then[p] / w for p, w in now.items() if w > 0.0 and p in then]

    def grown(self, first: int, incident: int) -> float:
        """Return the largest growth factor of a matrix from the first to the last recorded step in these bounds.

        1 with fewer than two recorded steps.
        """
        known = [s for s in sorted(self.weights) if first <= s <= incident]
        if len(known) < 2:
            return 1.0
        earlier, later = self.weights[known[0]], self.weights[known[-1]]
        return max((later[p] / w for p, w in earlier.items() if w > 0.0 and p in later), default=1.0)

    def rewritten(self, first: int, end: int) -> tuple[int, str, float] | None:
        """Find the first step after which a matrix is, and stays, :data:`JUMP` times larger than its update makes it.

        The RMS of a sum is at most the sum of the RMS: if a weight exceeds weight plus update, something else wrote it.

        Args:
            first: first step to check.
            end: the incident's step; its weights still count.

        Returns:
            The step, the parameter that grew most there, and its factor; None without such a step.
        """
        known = [s for s in sorted(self.weights) if first <= s <= end]
        for step, behind in pairwise(known):
            now, then, updates = self.weights[step], self.weights[behind], self.updates.get(step, {})
            last = self.weights[known[-1]]
            found = [
                (then[p] / (w + updates[p]), p)
                for p, w in now.items()
                if behind == step + 1
                and p in updates
                and p in then
                and min(then[p], last.get(p, then[p])) >= JUMP * (w + updates[p])
            ]
            if found:
                most, place = max(found)
                return step, parameter_label(place), most
        return None

    def seen(self, first: int, incident: int) -> bool:
        """Return whether the update of any step in ``[first, incident)`` was recorded."""
        return any(first <= s < incident and self.ratios(s) for s in self.updates)


def updates_before(view: RunView, process: Process, step: int) -> Updates:
    """Read the weights and updates of the newest sampled steps of a process up to and including ``step``.

    Weights that are almost zero are left out: any update replaces them.
    """
    sampled = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step <= step][-_NEWEST:]
    rows = view.measured(("rms", "fan_in", "dimensions"), ("weight", "update"), columns=("nan",), steps=sampled)
    mine = (rows["rank"] == process.rank) & (rows["attempt"] == process.attempt)
    sized = (rows["kind"] == "update") | (rows["rms"] * np.sqrt(rows["fan_in"]) >= _SIZED)
    rows = rows[mine & (rows["dimensions"] >= 2) & finite(rows) & rows["rms"].notna() & sized]
    found: dict[str, dict[int, dict[Parameter, float]]] = {"weight": {}, "update": {}}
    columns = (rows["kind"], rows["step"].tolist(), parameters(rows), rows["rms"].tolist())
    for kind, at, place, rms in zip(*columns, strict=True):
        found[kind].setdefault(at, {})[place] = rms
    least = _least_first_updates(view, process, found["weight"]) if found["weight"] else {}
    missing = {step: updates for step, updates in least.items() if step not in found["update"]}
    return Updates(found["weight"], {**missing, **found["update"]}, frozenset(missing))


def _least_first_updates(
    view: RunView, process: Process, weights: Mapping[int, Mapping[Parameter, float]]
) -> dict[int, dict[Parameter, float]]:
    """Return the least RMS of the first step's updates for weights that it doubled, if the script makes the updates.

    Which tensors such a script updates shows only after its first step, so the recorder has no weights to subtract. The
    RMS of an update is at least the difference of the RMS of the weight before and after it.
    """
    steps = view.timeline.get(process, ())
    if not steps or steps[0].optimizer or steps[0].skipped:
        return {}
    now, then = weights.get(steps[0].step, {}), weights.get(steps[0].step + 1, {})
    grown = {p: then[p] - w for p, w in now.items() if p in then and then[p] >= _DOUBLED * w}
    return {steps[0].step: grown} if grown else {}
