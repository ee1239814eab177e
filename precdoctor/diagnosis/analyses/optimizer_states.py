"""Recorded second moments of optimizers, each paired with the gradient of the same step, and their decay and eps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.parameters import ADAM, beta2_of, parameter_groups
from precdoctor.diagnosis.survey.frames import (
    PARAMETER,
    Ints,
    Mask,
    firsts,
    groups,
    histograms,
    pairs,
    parameters,
    rows_of,
)
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Parameter, number, text
from precdoctor.diagnosis.survey.view import RunView, remembered

#: Names of the mean or sum of squared gradients in torch's optimizers (``sum`` is Adagrad's); below, those of others.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
_OTHER_NAMES = re.compile(r"(^|_)(v|vt|nu|sq|square|squares|squared|second|variance|sum_sq)($|_)")
#: Optimizers of torch that divide by the gradient's own size: a root of mean or summed squares, or Adamax's maximum.
SCALE_FREE = (*ADAM, "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
_COLUMNS = (
    *("module_class", "dtype", "numel", "nan", "pos_inf", "zero", "subnormal", "sum", "sum_sq"),
    *("exp_lo", "exp_hist", "scale", "format"),
)


@dataclass(frozen=True)
class Moments:
    """Finite second moments, each with the finite gradient of the same weight and step.

    Attributes:
        held, gradient: the rows of moments and of gradients; row i of both has the same weight, process and step. In
            ``held`` the column ``state`` is the full name of the state, ``format`` the block format of quantised state.
        of: the row numbers of each weight, sorted by process and step.
    """

    held: pd.DataFrame
    gradient: pd.DataFrame
    of: Mapping[Parameter, Ints]


def is_second_moment(state: str) -> bool:
    """Return whether the name of a state is a usual one for a mean or sum of squared gradients."""
    return state in SECOND_MOMENTS or _OTHER_NAMES.search(state.lower()) is not None


@remembered
def second_moments(view: RunView) -> Moments:
    """Return all recorded second moments; computed once per view."""
    steps = [
        s for s in view.survey.steps_of.get("opt_state", np.zeros(0, np.int64)).tolist() if view.survey.covers([s])
    ]
    rows = states(view.measured((), ("opt_state", "weight_grad_step"), columns=_COLUMNS, steps=steps))
    rows = rows[(rows["nan"] == 0) & (rows["pos_inf"] == 0)]
    is_moment = rows["key"].isin([k for k in rows["key"].unique() if is_second_moment(k)])
    is_moment &= (rows["name"] != "") & _without_sign(rows)
    held, gradient = pairs(rows[is_moment | (rows["kind"] == "weight_grad_step")], "opt_state", "weight_grad_step")
    ids = groups(held, PARAMETER)
    order = np.lexsort([held[c] for c in ("step", "attempt", "rank")])
    of = {place: order[own] for place, own in zip(parameters(held.iloc[firsts(ids)]), rows_of(ids[order]), strict=True)}
    return Moments(held, gradient, dict(sorted(of.items())))


def states(rows: pd.DataFrame) -> pd.DataFrame:
    """Split the names of optimizer state rows: ``name`` becomes the weight's, ``key`` is ``exp_avg_sq``.

    ``state`` is the name as recorded. Rows of other kinds keep their name; their key is "".
    """
    parts = {str(n): str(n).rpartition(".") for n in rows["name"].cat.categories}
    state, name = rows["kind"] == "opt_state", rows["name"].astype(str)
    own, key = (name.map({n: p[i] for n, p in parts.items()}) for i in (0, 2))
    return rows.assign(state=name, name=own.where(state, name), key=key.where(state, ""))


def _without_sign(rows: pd.DataFrame) -> Mask:
    """Mask of the rows without elements far below zero: the sum is at least 0.999 of a bound on that of magnitudes."""
    found = histograms(rows)
    return np.nan_to_num(column(rows, "sum")) >= 0.999 * found.sums(np.exp2(found.bins.astype(np.float64)))


def excess(steps: Ints, means: Floats, squares: Floats, decay: float) -> float | None:
    """Return the mean of v at the last step over its mean in exact arithmetic; None with one step, or if that is 0.

    The mean over elements of ``v = decay v + (1 - decay) g^2`` follows the same recursion with the mean of g^2, which
    the rows hold. Between recorded steps that mean is taken to be the average of both ends.

    Args:
        steps: ascending, shape ``(n,)``.
        means: mean of v after each step, shape ``(n,)``.
        squares: mean of g^2 at each step, shape ``(n,)``.
        decay: of the second moment.
    """
    added = (1.0 - decay ** np.diff(steps)) * 0.5 * (squares[1:] + squares[:-1])
    remembered = decay ** (steps[-1] - steps)
    exact = remembered[0] * means[0] + float((remembered[1:] * added).sum())
    return float(means[-1] / exact) if steps.size > 1 and exact > 0.0 else None


def decay_of(view: RunView, name: str) -> float | None:
    """Return the largest decay of a second moment in any parameter group: Adam's beta2, RMSprop's alpha.

    0 for sums, such as Adagrad's, to which the squared gradient is added in full. None if none is recorded.
    """
    if name.rpartition(".")[2] in ("sum", "sum_sq"):
        return 0.0
    alpha = name.endswith("square_avg")
    decays = [number(g.get("alpha")) if alpha else beta2_of(g) for g in parameter_groups(view)]
    return max((d for d in decays if d is not None), default=None)


def adds_eps_to_root(view: RunView) -> bool:
    """Return whether every optimizer divides by sqrt(v) + eps, as torch's Adam, AdamW, RMSprop and Adagrad do."""
    known = (*ADAM, "RMSprop", "Adagrad")
    return bool(view.optimizers) and all(text(o.get("class")) in known for o in view.optimizers)


def divides_by_gradient(view: RunView) -> bool:
    """Return whether every optimizer divides by the gradient's own size, so that a factor on all gradients cancels."""
    return bool(view.optimizers) and all(text(o.get("class")) in SCALE_FREE for o in view.optimizers)
