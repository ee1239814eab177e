"""PD501, counts of lost updates per parameter, and of the moves that show how an optimizer rounds.

Optimizers that torch does not ship may round stochastically, carry the remainder (Kahan) or keep wider weights
elsewhere. Then small updates are not lost: a weight whose ulp is many times the update moves by one ulp now and then,
and on average as far as intended. Rounded to nearest it never moves. The mean size of the stored changes predicts how
many of a tensor's large weights should have moved.

Sources: Gupta et al., arXiv:1502.02551, section 3 (stochastic rounding is unbiased); Zamirai et al., arXiv:2010.06192,
algorithm 1 (Kahan: the remainder is carried until it is an ulp).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import parameter_label
from precdoctor.diagnosis.claims.finding import Location, Phase
from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.survey.frames import (
    AT,
    at,
    firsts,
    groups,
    histograms,
    keys,
    lasts,
    on_steps,
    pairs,
    rows_of,
)
from precdoctor.diagnosis.survey.measures import Floats, column, format_values, share
from precdoctor.diagnosis.survey.rows import Key, known_format, parameter_in, range_evidence, tensor_location, text
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView
from precdoctor.numerics.histogram import ExponentHistogram, Histograms

_COLUMNS = ("module_class", "dtype", "numel", "unchanged", "rel_lo", "rel_hist")
_MOVE_COLUMNS = ("dtype", "numel", "zero", "unchanged", "exp_lo", "exp_hist")
#: Usual names of optimizer state that carries the remainders of rounding.
_REMAINDER = re.compile(r"comp|kahan|remainder|residual|shift|carry|error|low_?bits|lsb|trunc")
#: Share of a tensor's elements, the largest, whose moves are counted; chosen empirically.
_LARGEST = 0.25
#: Mean change of the largest weights, in ulps, above which the format resolves updates: an update of half an ulp
#: already sticks, and some updates are several times the mean.
_RESOLVED = 0.1


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
    def location(self) -> Location:
        """The place of a finding about the updates."""
        return tensor_location(self.key, self.module_class, "update", Phase.OPTIMIZER, *self.last)

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


# -- how an optimizer rounds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """Moves of the largest quarter of each narrow weight, summed over the later half of the examined steps.

    If nothing moved, ``steps`` counts all examined steps.
    """

    #: True if they prove that rounding has no bias: stochastic, compensated, or from wider weights kept elsewhere.
    #: False if they prove that it is to nearest; else None.
    unbiased: bool | None
    expected: float = 0.0
    seen: int = 0
    steps: int = 0
    #: No element of any narrow weight moved on any step.
    still: bool = False


def rounding_of(view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...], options: Options) -> Moves:
    """Return how weights in ``dtypes`` (narrower than FP32) are rounded on ``steps``, with the moves that prove it."""
    ordered, expected_moves, seen_moves, changed, intended = _step_sums(view, steps, dtypes)
    states = {str(name).rpartition(".")[2].lower() for *_, name in view.places("opt_state")}
    if not ordered or any(map(_REMAINDER.search, states)) or view.places("master_weight"):
        return Moves(None)
    if not any(changed):
        proven = ordered[-1][1] - ordered[0][1] >= options["still_steps"] and sum(intended) > 0
        return Moves(False if proven else None, steps=len(ordered), still=True)
    late = len(ordered) // 2
    expected, seen = sum(expected_moves[late:]), int(sum(seen_moves[late:]))
    unbiased = None
    if expected >= options["min_moves"] and seen >= 0.5 * expected:
        unbiased = True
    elif expected >= options["min_moves"] and seen <= options["moved_share"] * expected:
        unbiased = None if _moves_grow(view, ordered, expected_moves) else False
    return Moves(unbiased, expected, seen, len(ordered) - late)


def _moves_grow(view: RunView, steps: Sequence[tuple[Process, int]], expected: Sequence[float]) -> bool:
    """Return whether expected moves, per unit of learning rate if known, grow from the first quarter to the last.

    They do under compensated summation, because more and more remainders reach an ulp. Rounded to nearest, updates
    stick as often on one step as on another.
    """
    facts = [view.step_facts(*step) for step in steps]
    per_rate = [moves / ((f.lr if f is not None else None) or 1.0) for f, moves in zip(facts, expected, strict=True)]
    quarter = max(1, len(steps) // 4)
    first, last = (sum(part) / quarter for part in (per_rate[:quarter], per_rate[-quarter:]))
    return last >= 1.5 * first


def _step_sums(
    view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...]
) -> tuple[list[tuple[Process, int]], list[float], list[float], list[float], list[float]]:
    """Return those of ``steps`` that have rows of weights and updates in ``dtypes``, by number, and sums over each.

    These are expected and seen moves, changed elements, and intended updates.
    """
    frame = view.measured((), ("weight", "update"), columns=_MOVE_COLUMNS, where=[("dtype", "in", dtypes)])
    weights, updates = pairs(frame[on_steps(frame, steps)], "weight", "update")
    numel = column(updates, "numel")
    intended = numel - column(updates, "zero") + np.nan_to_num(column(updates, "unchanged"))
    changes = histograms(updates)
    expected, seen = _moves(weights, changes, numel, intended)
    ids = groups(updates, AT)
    first = updates.iloc[firsts(ids)]
    order = np.argsort(first["step"].to_numpy(), kind="stable")
    sums = (np.bincount(ids, values)[order].tolist() for values in (expected, seen, changes.total, intended))
    return at(first.iloc[order]), *sums


def _moves(weights: pd.DataFrame, changes: Histograms, numel: Floats, intended: Floats) -> tuple[Floats, Floats]:
    """Return, per weight, expected moves of its largest quarter under unbiased rounding, and seen changes as large.

    In bin k of a weight the ulp is 2^(k - p), with p mantissa bits (at the upper end of the bin: that of a move down).
    The mean stored change, each change taken at the lower end of its bin, is at most the mean intended update, so that
    the expectation errs on the low side. Both are 0 for a weight whose format resolves its updates, because such a
    weight moves however it is rounded.
    """
    held, mantissa = histograms(weights), format_values(weights, "mantissa_bits")
    whose, smallest = held.whose, np.log2(format_values(weights, "min_subnormal"))
    from_top = held.total[whose] - held.preceding
    first = held.lo.copy()
    large = from_top >= _LARGEST * numel[whose]
    np.maximum.at(first, whose[large], held.bins[large])
    edge = np.maximum(first - mantissa, smallest)
    mean = share(changes.sums(np.exp2(changes.bins.astype(np.float64))), intended)
    proving = (held.total > 0) & (mean <= _RESOLVED * np.exp2(edge))
    ulps = np.maximum(held.bins - mantissa[whose], smallest[whose])
    moving = np.where(held.bins >= first[whose], np.minimum(1.0, mean[whose] * np.exp2(-ulps)), 0.0)
    seen = changes.total - changes.below(np.ceil(edge - 1.0).astype(np.int64))
    return np.where(proving, held.sums(moving) * intended / np.maximum(numel, 1.0), 0.0), np.where(proving, seen, 0.0)
