"""PD501, rounding: how an optimizer rounds 16-bit weights, read from which weights move.

Optimizers that torch does not ship may round stochastically, carry the remainder (Kahan) or keep wider weights
elsewhere. Then small updates are not lost: a weight whose ulp is many times the update moves by one ulp now and then,
and on average as far as intended. Rounded to nearest it never moves. The mean size of the stored changes predicts how
many of a tensor's large weights should have moved.

Sources: Gupta et al., arXiv:1502.02551, section 3 (stochastic rounding is unbiased); Zamirai et al., arXiv:2010.06192,
algorithm 1 (Kahan: the remainder is carried until it is an ulp).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.claims.rule import Options
from precdoctor.diagnosis.survey.frames import AT, at, firsts, groups, histograms, on_steps, pairs
from precdoctor.diagnosis.survey.measures import Floats, column, format_values, share
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.histogram import Histograms

_COLUMNS = ("dtype", "numel", "zero", "unchanged", "exp_lo", "exp_hist")
#: Usual names of optimizer state that carries the remainders of rounding.
_REMAINDER = re.compile(r"comp|kahan|remainder|residual|shift|carry|error|low_?bits|lsb|trunc")
#: Share of a tensor's elements, the largest, whose moves are counted; chosen empirically.
_LARGEST = 0.25
#: Mean change of the largest weights, in ulps, above which the format resolves updates: an update of half an ulp
#: already sticks, and some updates are several times the mean.
_RESOLVED = 0.1


class Rounding(enum.Enum):
    """How an optimizer rounds 16-bit weights, as far as moves of the largest weights prove it."""

    NEAREST = "to nearest"
    #: Stochastic, compensated, or from wider weights kept elsewhere.
    UNBIASED = "unbiased"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Moves:
    """Moves of the largest quarter of each narrow weight, summed over the later half of the examined steps.

    If nothing moved, ``steps`` counts all examined steps.
    """

    rounding: Rounding
    expected: float = 0.0
    seen: int = 0
    steps: int = 0
    #: No element of any narrow weight moved on any step.
    still: bool = False


def rounding_of(view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...], options: Options) -> Moves:
    """Return how weights in ``dtypes`` (narrower than FP32) are rounded on ``steps``, with the moves that prove it."""
    ordered, expected_moves, seen_moves, changed, intended = _step_sums(view, steps, dtypes)
    if not ordered or carries_remainder(view):
        return Moves(Rounding.UNKNOWN)
    if not any(changed):
        proven = ordered[-1][1] - ordered[0][1] >= options["still_steps"] and sum(intended) > 0
        return Moves(Rounding.NEAREST if proven else Rounding.UNKNOWN, steps=len(ordered), still=True)
    late = len(ordered) // 2
    expected, seen = sum(expected_moves[late:]), int(sum(seen_moves[late:]))
    rounding = Rounding.UNKNOWN
    if expected >= options["min_moves"] and seen >= 0.5 * expected:
        rounding = Rounding.UNBIASED
    elif expected >= options["min_moves"] and seen <= options["moved_share"] * expected:
        rounding = Rounding.UNKNOWN if _moves_grow(view, ordered, expected_moves) else Rounding.NEAREST
    return Moves(rounding, expected, seen, len(ordered) - late)


def carries_remainder(view: RunView) -> bool:
    """Return whether optimizer state has a name of remainders, or wider copies of the weights were recorded."""
    names = {str(name).rpartition(".")[2].lower() for *_, name in view.places("opt_state")}
    return any(_REMAINDER.search(n) for n in names) or bool(view.places("master_weight"))


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
    frame = view.measured((), ("weight", "update"), columns=_COLUMNS, where=[("dtype", "in", dtypes)])
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
