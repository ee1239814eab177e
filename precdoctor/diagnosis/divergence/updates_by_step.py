"""How large the update of each weight matrix was against the weight, step by step before an incident."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from precdoctor.diagnosis.survey.parameters import parameter_label
from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.view import Process, RunView

#: Sampled steps looked at: the newest.
_NEWEST = 64
#: RMS x sqrt(fan-in) below which a weight has nothing to lose: zero-initialised, or nearly so (as PD504's ``sized``).
_SIZED = 0.2
_COLUMNS = ("root", "module", "kind", "name", "shape", "numel", "nan", "pos_inf", "neg_inf", "sum_sq")
_Place = tuple[str, str, str]


@dataclass(frozen=True)
class Updates:
    """Per sampled step and weight matrix the RMS of the weight before the step, and of its update, as stored."""

    weights: Mapping[int, Mapping[_Place, float]]
    updates: Mapping[int, Mapping[_Place, float]]

    def ratios(self, step: int) -> dict[_Place, float]:
        """RMS of the update over RMS of the weight, of all matrices of the step."""
        weights = self.weights.get(step, {})
        return {p: u / weights[p] for p, u in self.updates.get(step, {}).items() if weights.get(p)}

    def ratio(self, step: int) -> float | None:
        """The largest of a step; None where none was recorded."""
        return max(self.ratios(step).values(), default=None)

    def largest(self, first: int, end: int) -> tuple[float | None, str]:
        """The first step's largest ratio that replaces a weight from ``first`` on and before ``end``, and whose."""
        steps = [s for s in sorted(self.updates) if first <= s < end and self.ratios(s)]
        found = [max((r, p) for p, r in self.ratios(s).items()) for s in steps]
        worst = found[0] if found else None
        for each in found[:2]:  # the root's own update, or the one behind it
            worst = each if worst is None or each[0] > worst[0] else worst
        return (None, "") if worst is None else (worst[0], parameter_label(*worst[1]))

    def factors(self, step: int) -> list[float]:
        """What the RMS of each matrix is multiplied by, where the next step was recorded as well."""
        now, then = self.weights.get(step, {}), self.weights.get(step + 1, {})
        return [then[p] / w for p, w in now.items() if w > 0.0 and p in then]

    def grown(self, first: int, incident: int) -> float:
        """By how much the matrix that grew most did, from step ``first`` to ``incident`` or the last one recorded."""
        known = [s for s in sorted(self.weights) if first <= s <= incident]
        if len(known) < 2:
            return 1.0
        begun, ended = self.weights[known[0]], self.weights[known[-1]]
        return max((ended[p] / w for p, w in begun.items() if w > 0.0 and p in ended), default=1.0)

    def rewritten(self, first: int, end: int, times: float) -> tuple[int, str, float] | None:
        """The first step after which a matrix is ``times`` larger than its update can have made it, and stays so.

        The RMS of a sum is at most the sum of the RMS: what is beyond weight plus update was written by something else.

        Args:
            first: step from which to look.
            end: the incident's step, whose weights are still read.
            times: over that sum.

        Returns:
            The step, the parameter, and how many times; the matrix that grew most, over all that grew there.
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
                and min(then[p], last.get(p, then[p])) >= times * (w + updates[p])
            ]
            if found:
                most, place = max(found)
                return step, parameter_label(*place), most
        return None

    def seen(self, first: int, incident: int) -> bool:
        """Whether any update from step ``first`` on was recorded."""
        return any(first <= s < incident and self.ratios(s) for s in self.updates)


def updates_before(view: RunView, process: Process, step: int) -> Updates:
    """Of the newest sampled steps of a process up to ``step``, whose weights are read as well.

    Weights that are almost zero have nothing to lose, whatever their update; they are left out while they are so.
    """
    sampled = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step <= step][-_NEWEST:]
    found: dict[str, dict[int, dict[_Place, float]]] = {"weight": {}, "update": {}}
    for r in view.scan_records(_COLUMNS, ("weight", "update"), steps=sampled):
        energy, shape = number(r["sum_sq"]), r["shape"]
        if (int(r["rank"]), int(r["attempt"])) != (process.rank, process.attempt) or shape is None or len(shape) < 2:
            continue
        if energy is None or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        numel = max(1, int(r["numel"]))
        rms, kind = math.sqrt(energy / numel), str(r["kind"])
        if kind == "weight" and rms * math.sqrt(numel / max(1, int(shape[0]))) < _SIZED:
            continue
        place = (str(r["root"]), str(r["module"]), str(r["name"]))
        found[kind].setdefault(int(r["step"]), {})[place] = rms
    return Updates(found["weight"], found["update"])
