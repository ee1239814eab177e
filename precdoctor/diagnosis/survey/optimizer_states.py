"""Recorded second moments of optimizers, each paired with the gradient of the same step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

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
from precdoctor.diagnosis.survey.parameters import ADAM, beta2_of, parameter_groups
from precdoctor.diagnosis.survey.rows import Parameter, number, text
from precdoctor.diagnosis.survey.view import RunView

#: Names of the mean or sum of squared gradients in torch's optimizers (``sum`` is Adagrad's), and usual ones elsewhere.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
_OTHER_NAMES = re.compile(r"(^|_)(v|vt|nu|sq|square|squares|squared|second|variance|sum_sq)($|_)")
#: Optimizers of torch that divide by the root of the mean or sum of squared gradients.
SCALE_FREE = (*ADAM, "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
_COLUMNS = (
    *("module_class", "dtype", "numel", "nan", "pos_inf", "zero", "subnormal", "sum", "sum_sq"),
    *("exp_lo", "exp_hist", "scale", "format"),
)


@dataclass(frozen=True)
class Moments:
    """Finite second moments, each with the finite gradient of the same weight and step.

    Attributes:
        held, gradient: the rows, one by one the same weight, process and step; ``state`` is the name of the moment's,
            ``format`` what quantised state is stored in, with a scale per block.
        of: per weight its rows, by process and step.
    """

    held: pd.DataFrame
    gradient: pd.DataFrame
    of: Mapping[Parameter, Ints]


def is_second_moment(state: str) -> bool:
    """Whether a state is called as means or sums of squared gradients are."""
    return state in SECOND_MOMENTS or _OTHER_NAMES.search(state.lower()) is not None


def second_moments(view: RunView) -> Moments:
    """All that were recorded; one pass, remembered by the view."""
    return view.remember("second-moments", lambda: _second_moments(view))


def _second_moments(view: RunView) -> Moments:
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
    """Rows of optimizer state with the weight's ``name``, ``key`` (``exp_avg_sq``), and the row's own name, ``state``.

    Rows of other kinds have the key "".
    """
    parts = {str(n): str(n).rpartition(".") for n in rows["name"].cat.categories}
    state, name = rows["kind"] == "opt_state", rows["name"].astype(str)
    own, key = (name.map({n: p[i] for n, p in parts.items()}) for i in (0, 2))
    named: pd.DataFrame = rows.assign(state=name, name=own.where(state, name), key=key.where(state, ""))
    return named


def _without_sign(rows: pd.DataFrame) -> Mask:
    """Whether no element is far below zero: the sum is at least that of the magnitudes' lower ends."""
    found = histograms(rows)
    mask: Mask = np.nan_to_num(column(rows, "sum")) >= 0.999 * found.sums(np.exp2(found.bins.astype(np.float64)))
    return mask


def excess(steps: Ints, means: Floats, squares: Floats, decay: float) -> float | None:
    """Mean of v at the last of these steps over its mean in exact arithmetic.

    The mean over elements of ``v = decay v + (1 - decay) g^2`` follows the same recursion with the mean of g^2, which
    the rows hold; between recorded steps it is interpolated by the mean of both ends. None with fewer than two steps.

    Args:
        steps: ascending; shape as of the next two.
        means: of v after each step.
        squares: mean of g^2.
    """
    added = (1.0 - decay ** np.diff(steps)) * 0.5 * (squares[1:] + squares[:-1])
    remembered = decay ** (steps[-1] - steps)
    exact = remembered[0] * means[0] + float((remembered[1:] * added).sum())
    return float(means[-1] / exact) if steps.size > 1 and exact > 0.0 else None


def decay_of(view: RunView, name: str) -> float | None:
    """The largest decay of the second moment in force: Adam's beta2, RMSprop's alpha; None when not on record.

    0 for sums, which Adagrad keeps: a squared gradient is added whole.
    """
    if name.rpartition(".")[2] in ("sum", "sum_sq"):
        return 0.0
    alpha = name.endswith("square_avg")
    decays = [number(g.get("alpha")) if alpha else beta2_of(g) for g in parameter_groups(view)]
    return max((d for d in decays if d is not None), default=None)


def adds_eps_to_root(view: RunView) -> bool:
    """Whether every optimizer divides by sqrt(v) + eps, as torch's Adam, AdamW, RMSprop and Adagrad do."""
    known = (*ADAM, "RMSprop", "Adagrad")
    return bool(view.optimizers) and all(text(o.get("class")) in known for o in view.optimizers)


def divides_by_gradient(view: RunView) -> bool:
    """Whether every optimizer divides by the gradient's own size, element by element, so that a factor cancels."""
    return bool(view.optimizers) and all(text(o.get("class")) in SCALE_FREE for o in view.optimizers)
