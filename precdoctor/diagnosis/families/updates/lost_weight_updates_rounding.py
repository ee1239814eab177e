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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.rows import integer, known_format, parameter_of
from precdoctor.diagnosis.survey.view import Process, RunView, process_step
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import ExponentHistogram

_COLUMNS = ("root", "module", "kind", "name", "dtype", "numel", "zero", "unchanged", "exp_lo", "exp_hist")
#: Usual names of optimizer state that carries the remainders of rounding.
_REMAINDER = re.compile(r"comp|kahan|remainder|residual|shift|carry|error|low_?bits|lsb|trunc")
#: Share of a tensor's elements, the largest, whose moves are counted; chosen empirically.
_LARGEST = 0.25
#: Mean change in ulps of the largest weights from which the format resolves updates: half an ulp sticks, and some
#: updates are several times the mean.
_RESOLVED = 0.1


class Rounding(enum.Enum):
    """How 16-bit weights are rounded, as far as the moves of the large ones show."""

    NEAREST = "to nearest"
    #: Stochastic, compensated, or from wider weights kept elsewhere.
    UNBIASED = "unbiased"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Proof:
    """Thresholds of a proof."""

    #: Expected moves from which their absence proves anything.
    min_moves: float
    #: Seen among expected moves up to which the weights are rounded to nearest.
    moved_share: float
    #: Steps between the first and the last examined one, if nothing moved on any.
    still_steps: float


@dataclass(frozen=True)
class Moves:
    """Moves of the largest quarter of each narrow weight, summed over the later half of the examined steps."""

    rounding: Rounding
    expected: float = 0.0
    seen: int = 0
    steps: int = 0
    #: No element of any narrow weight moved on any step.
    still: bool = False


@dataclass
class _Step:
    expected: float = 0.0
    seen: int = 0
    changed: int = 0
    intended: int = 0


@dataclass
class _Weights:
    """The exponents of a weight before its update."""

    histogram: ExponentHistogram
    format: Format = field(repr=False)


def rounding_of(view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...], proof: Proof) -> Moves:
    """How weights in these dtypes, narrower than FP32, are rounded on these steps."""
    by_step = _by_step(view, steps, dtypes)
    if not by_step or carries_remainder(view):
        return Moves(Rounding.UNKNOWN)
    ordered = sorted(by_step, key=lambda k: k[1])
    late = ordered[len(ordered) // 2 :]
    expected, seen = sum(by_step[k].expected for k in late), sum(by_step[k].seen for k in late)
    still = not any(s.changed for s in by_step.values())
    if still:
        long_enough = ordered[-1][1] - ordered[0][1] >= proof.still_steps
        proven = long_enough and sum(s.intended for s in by_step.values()) > 0
        return Moves(Rounding.NEAREST if proven else Rounding.UNKNOWN, steps=len(ordered), still=True)
    if expected < proof.min_moves:
        return Moves(Rounding.UNKNOWN, expected, seen, len(late))
    if seen >= 0.5 * expected:
        return Moves(Rounding.UNBIASED, expected, seen, len(late))
    proven = seen <= proof.moved_share * expected and not _piles_up(view, by_step, ordered)
    return Moves(Rounding.NEAREST if proven else Rounding.UNKNOWN, expected, seen, len(late))


def carries_remainder(view: RunView) -> bool:
    """Whether the optimizer keeps state named like a remainder, or wider copies of the weights."""
    names = {str(name).rpartition(".")[2].lower() for *_, name in view.places("opt_state")}
    return any(_REMAINDER.search(n) for n in names) or bool(view.places("master_weight"))


def _piles_up(view: RunView, by_step: Mapping[tuple[Process, int], _Step], ordered: list[tuple[Process, int]]) -> bool:
    """Whether the weights move further from step to step, as compensated sums do while remainders grow to an ulp.

    Rounded to nearest, as much sticks of one step as of another.
    """
    quarter = max(1, len(ordered) // 4)
    return _pace(view, by_step, ordered[-quarter:]) >= 1.5 * _pace(view, by_step, ordered[:quarter])


def _pace(view: RunView, by_step: Mapping[tuple[Process, int], _Step], keys: list[tuple[Process, int]]) -> float:
    """Mean number of moves of the large weights on these steps, per unit of learning rate if it is known."""
    facts = {key: view.step_facts(*key) for key in keys}
    rates = {key: (f.lr if f is not None and f.lr else None) or 1.0 for key, f in facts.items()}
    return sum(by_step[k].expected / rate for k, rate in rates.items()) / len(keys)


def _by_step(
    view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...]
) -> dict[tuple[Process, int], _Step]:
    found: dict[tuple[Process, int], _Step] = {}
    for key, weights, r in _pairs(view, steps, dtypes):
        unchanged, zero = integer(r["unchanged"]) or 0, integer(r["zero"]) or 0
        changes = ExponentHistogram.of(integer(r["exp_lo"]), r["exp_hist"])
        intended = int(r["numel"]) - zero + unchanged
        step = found.setdefault(key, _Step())
        step.changed += changes.total
        step.intended += intended
        expected, seen = _moves(weights, changes, int(r["numel"]), intended)
        step.expected += expected
        step.seen += seen
    return found


def _moves(weights: _Weights, changes: ExponentHistogram, numel: int, intended: int) -> tuple[float, int]:
    """Expected moves of the largest quarter of a weight under unbiased rounding, and seen changes of that size.

    Bin k of a weight has the ulp 2^(k - p), p the mantissa bits (its closed upper end included, going down). The mean
    intended update is at least the mean stored change, each taken at the lower end of its bin: the expectation is low.
    A weight whose updates its format resolves proves nothing: it moves however it is rounded.
    """
    bins, counts = weights.histogram.lo + np.arange(weights.histogram.counts.size), weights.histogram.counts
    if not counts.sum() or not intended:
        return 0.0, 0
    from_top = np.cumsum(counts[::-1])[::-1]
    first = int(np.flatnonzero(from_top >= _LARGEST * numel)[-1]) if from_top[0] >= _LARGEST * numel else 0
    fmt = weights.format
    smallest = float(np.log2(fmt.min_subnormal))
    ulps = np.maximum(bins[first:] - fmt.mantissa_bits, smallest)
    change_bins = changes.lo + np.arange(changes.counts.size)
    mean = float((changes.counts * np.exp2(change_bins.astype(np.float64))).sum()) / intended
    if mean > _RESOLVED * 2.0 ** ulps[0]:
        return 0.0, 0
    expected = float((counts[first:] * np.minimum(1.0, mean * np.exp2(-ulps))).sum()) * intended / numel
    seen = int(changes.counts[change_bins >= ulps[0] - 1.0].sum())
    return expected, seen


def _pairs(
    view: RunView, steps: set[tuple[Process, int]], dtypes: tuple[str, ...]
) -> Iterator[tuple[tuple[Process, int], _Weights, Mapping[str, Any]]]:
    """Pair every update with the exponents of its weight before it."""
    weights: dict[tuple[Any, ...], _Weights] = {}
    updates: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for r in view.scan_records(_COLUMNS, ("weight", "update"), where=[("dtype", "in", dtypes)]):
        at = process_step(r)
        fmt = known_format(str(r["dtype"]))
        if at not in steps or fmt is None:
            continue
        key = (at, parameter_of(r))
        if r["kind"] == "update":
            updates[key] = r
        else:
            weights[key] = _Weights(ExponentHistogram.of(integer(r["exp_lo"]), r["exp_hist"]), fmt)
        if key in updates and key in weights:
            yield at, weights.pop(key), updates.pop(key)
