"""PD504: weight matrices, and the size of their updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.histories import newer_half, watched_steps
from precdoctor.diagnosis.survey.frames import AT, PARAMETER, Ints, by_kind, finite, firsts, groups, parameters, rows_of
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Parameter, text
from precdoctor.diagnosis.survey.view import Process, RunView

_COLUMNS = ("module_class", "nan", "pos_inf", "neg_inf")
#: Up to this many times 1 / sqrt(n), n updates in random directions are the weight's size. Chosen empirically.
_WANDERS = 1.5


@dataclass(frozen=True)
class Weight:
    """A weight matrix and its updates.

    Attributes:
        first, final: RMS before the first and before the last examined step that recorded the weight.
        ratios: RMS of each update over that of the weight (over ``base``, for the first steps), by step.
        rows: rank, attempt and step of each ratio, shape ``(ratios, 3)``.
        since: the first examined step that recorded the weight.
        base: RMS that the first updates are compared with: the initial one, or that of a usual initialisation.
        from_nothing: whether it was initialised to nothing, so that ``base`` is the usual size.
    """

    module_class: str
    first: float
    final: float
    fan_in: float
    ratios: Floats
    rows: Ints
    since: int
    base: float
    from_nothing: bool

    @property
    def left(self) -> float:
        """RMS at last over RMS at first."""
        return self.final / self.first

    @property
    def ratio(self) -> float:
        """Median ratio; the lower of two middle ones, because in a run that explodes their mean is the explosion."""
        return float(self.ratios[self._middle])

    @property
    def middle(self) -> tuple[Process, int]:
        """Process and step of the median ratio."""
        return self.place(self._middle)

    @property
    def _middle(self) -> int:
        return int(np.argsort(self.ratios, kind="stable")[(self.ratios.size - 1) // 2])

    @property
    def last(self) -> tuple[Process, int]:
        """Process and step of the last ratio."""
        return self.place(int(self.rows[:, 2].argmax()))

    def finds_its_size(self, sized: float) -> bool:
        """Return whether a weight that began at almost nothing has made so few updates that these are its size.

        Updates in random directions sum to the square root of their number.
        """
        gain = self.first * math.sqrt(self.fan_in)  # for unit noise: of order 1 with any usual initialisation
        return gain < sized and self.ratio * math.sqrt(max(1, self.middle[1] - self.since)) < _WANDERS

    def place(self, row: int) -> tuple[Process, int]:
        rank, attempt, step = self.rows[row].tolist()
        return Process(rank, attempt), step


def survey_weights(
    view: RunView, first: int | None = None, since: int = 0, sized: float = 0.0
) -> Mapping[Parameter, Weight]:
    """Return weights with ratios on the newer half of the recorded steps.

    With ``first``, ratios are those of the first so many steps from ``since`` on, to the initial RMS. A weight with
    less gain than ``sized`` then was initialised to nothing: its ratios are to the RMS of a usual initialisation.
    """
    skipped = {s.step for steps in view.timeline.values() for s in steps if s.skipped}
    steps = [s for s in watched_steps(view) if s not in skipped]
    early, begins = newer_half(view, steps) if first is None else ([s for s in steps if s >= since][:first], steps[:1])
    examined = sorted({*begins, *early, *steps[-1:]})
    rows = view.measured(("rms", "dimensions", "fan_in"), ("weight", "update"), columns=_COLUMNS, steps=examined)
    rows = rows[finite(rows) & rows["sum_sq"].notna() & (rows["dimensions"] >= 2)]
    known, (before, update) = by_kind(rows, column(rows, "rms"), ("weight", "update"))
    recorded, before, at = ~np.isnan(before), np.nan_to_num(before), known[list(AT)].to_numpy()
    counted = ~np.isnan(update) & np.isin(at[:, 2], early)
    ids = groups(known, PARAMETER)
    one = known.iloc[firsts(ids)]
    described = zip(
        parameters(one), one["module_class"], one["fan_in"], one["numel"], rows_of(ids, known["step"]), strict=True
    )
    found = {}
    for place, module_class, fan_in, numel, own in described:
        moved = own[before[own] > 0.0]
        initial = float(before[own[0]])
        nothing = bool(recorded[own[0]]) and initial * math.sqrt(fan_in) < sized
        # Without a usual size to compare with, the updates of a weight that begins at zero have the ratio 0.
        base = _usual_size(text(module_class), fan_in, numel) if nothing else initial or math.inf
        begun = own[counted[own] & (nothing | (before[own].cumsum() > 0.0))]
        chosen = moved[counted[moved]] if first is None else begun
        if chosen.size and moved.size:
            ratios = update[chosen] / (before[chosen] if first is None else base)
            sizes = initial, float(before[moved[-1]]), fan_in
            found[place] = Weight(text(module_class), *sizes, ratios, at[chosen], int(at[own[0], 2]), base, nothing)
    return found


def _usual_size(module_class: str, fan_in: float, numel: float) -> float:
    """Return the RMS of a usual initialisation: 1 / sqrt(fan-in); 1 for what is added or looked up, not multiplied."""
    looked_up = numel <= fan_in or module_class.startswith("Embedding")
    return 1.0 if looked_up else 1.0 / math.sqrt(fan_in)
