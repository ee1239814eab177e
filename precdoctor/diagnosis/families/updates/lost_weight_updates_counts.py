"""PD501, counts of lost updates: per parameter, over the steps whose learning rate is not small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.survey.frames import at, firsts, groups, histograms, keys, lasts, on_steps, rows_of
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Key, known_format, parameter_in, range_evidence, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.histogram import ExponentHistogram, Histograms

_COLUMNS = ("module_class", "dtype", "numel", "unchanged", "rel_lo", "rel_hist")


@dataclass(frozen=True)
class Counts:
    """Lost and intended updates of one parameter, in elements, over the usable steps.

    Attributes:
        key: identity of its updates.
        last: process and step of the last row.
        relative: histogram of exponent(dw) - exponent(w); empty if the gradient stands in for the update.
        by_step: lost and intended updates of each row on a usable step (one per rank), in the log's order; shape
            ``(rows, 2)``.
    """

    key: Key
    dtype: str
    module_class: str
    numel: int
    last: tuple[Process, int]
    relative: ExponentHistogram
    by_step: Floats
    #: Number of usable steps with a row, whatever the number of ranks.
    steps: int

    @property
    def name(self) -> str:
        """The name of the parameter in messages."""
        return parameter_label(parameter_in(self.key))

    @property
    def lost(self) -> float:
        """Number of intended updates that left their element unchanged."""
        return float(self.by_step[:, 0].sum())

    @property
    def intended(self) -> float:
        """Number of non-zero updates that the optimizer meant to make."""
        return float(self.by_step[:, 1].sum())

    @property
    def share(self) -> float:
        """Lost share of the intended updates; 0 if none was intended."""
        return self.lost / self.intended if self.intended else 0.0

    def rate_words(self, view: RunView) -> str:
        """`` at learning rates up to 0.001``, of the optimizer that makes the last step; empty if no rate is known."""
        process, step = self.last
        facts = view.step_facts(process, step)
        rates = [s.lr for s in view.timeline.get(process, ()) if s.lr and facts and s.optimizer == facts.optimizer]
        return f" at learning rates up to {max(rates):.3g}" if rates else ""

    def weight_range(self, view: RunView) -> dict[str, Any]:
        """Return the ``range`` entry of the evidence: the weight on its last step, and in words its ulp and update.

        Empty if the weight was not recorded on that step.
        """
        own = [r for r in view.rows(*self.last) if r.owner == parameter_in(self.key)]
        weight, update = (next((r for r in own if r.kind == kind), None) for kind in ("weight", "update"))
        if weight is None:
            return {}
        words, fmt = "weight", known_format(weight.dtype)
        if fmt is not None and weight.amax and math.isfinite(weight.amax):
            half = 0.5 * fmt.ulp_at_one * 2.0 ** math.floor(math.log2(weight.amax))
            words += f", half an ulp {half:.3g} at its amax"
            if update is not None and update.amax is not None:
                words += f"; the largest update is {update.amax:.3g}"
        return {"range": {**range_evidence(weight), "tensor": words}}


def is_update_guessed(view: RunView) -> bool:
    """Return whether a non-zero gradient stands in for the intended update of every optimizer."""
    return bool(view.optimizers) and all(text(o.get("intended_update")) == "gradient" for o in view.optimizers)


def usable_steps(view: RunView, lr_share: float) -> set[tuple[Process, int]]:
    """Return the unskipped steps at ``lr_share`` of their optimizer's largest rate or more; all if no rate is known."""
    attempts = [(p, s) for p, steps in view.timeline.items() for s in steps if not s.skipped]
    highest: dict[str, float] = {}
    for _, s in attempts:
        if s.lr is not None:
            highest[s.optimizer] = max(s.lr, highest.get(s.optimizer, 0.0))
    if not highest:
        return {(p, s.step) for p, s in attempts}
    return {(p, s.step) for p, s in attempts if s.lr and s.lr >= lr_share * highest[s.optimizer]}


def survey(
    view: RunView, usable: set[tuple[Process, int]], dtypes: tuple[str, ...], beyond: int | None = None
) -> list[Counts]:
    """Count the updates of every parameter in one of ``dtypes``, in the log's order.

    Args:
        beyond: updates more than this many binades below their weight count neither as lost nor as intended.
    """
    frame = view.measured(("intended",), ("update",), columns=_COLUMNS, where=[("dtype", "in", dtypes)])
    frame = frame[frame["unchanged"].notna() & on_steps(frame, usable)]
    relative = histograms(frame, "rel")
    if is_update_guessed(view):  # a gradient that stands in for the update does not show the update's size
        relative = Histograms(relative.lo, 0 * relative.lengths, relative.counts[:0])
    counts = lost_and_intended(frame, relative, beyond)
    ids = groups(frame, IDENTITY)
    first, last = frame.iloc[firsts(ids)], frame.iloc[lasts(ids)]
    summed = relative.merged(ids, len(first))
    columns = (keys(first), first["dtype"], first["module_class"].map(text), last["numel"], at(last))
    step = frame["step"].to_numpy()
    return [
        Counts(*values, summed.row(i), counts[rows], np.unique(step[rows]).size)
        for i, (values, rows) in enumerate(zip(zip(*columns, strict=True), rows_of(ids), strict=True))
    ]


def lost_and_intended(frame: pd.DataFrame, relative: Histograms, beyond: int | None) -> Floats:
    """Return the lost and the intended updates of each row, shape ``(rows, 2)``; ``beyond`` as in :func:`survey`."""
    trivial = 0 if beyond is None else relative.below(-beyond)
    both = np.stack([column(frame, "unchanged") - trivial, column(frame, "intended") - trivial], axis=1)
    return np.maximum(both, 0.0)


def listed_updates(worst: Counts, weights: Sequence[Counts]) -> dict[str, Any]:
    """Return the entries ``tensors``, the first 16 of ``weights``, and ``relative_update`` of the evidence."""
    return {
        "tensors": [{"root": p.key[0], "parameter": p.name, "lost_share": p.share} for p in weights[:16]],
        "relative_update": {"exp_lo": worst.relative.lo, "exp_hist": worst.relative.counts.tolist()},
    }
