"""Recorded second moments of optimizers, each paired with the gradient of the same step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.parameters import ADAM, beta2_of, parameter_groups, parameter_label
from precdoctor.diagnosis.survey.rows import Parameter, integer, number, parameter_of, text
from precdoctor.diagnosis.survey.view import Process, RunView, process_step
from precdoctor.numerics.histogram import ExponentHistogram

#: Names of the mean or sum of squared gradients in torch's optimizers (``sum`` is Adagrad's), and usual ones elsewhere.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
_OTHER_NAMES = re.compile(r"(^|_)(v|vt|nu|sq|square|squares|squared|second|variance|sum_sq)($|_)")
#: Optimizers of torch that divide by the root of the mean or sum of squared gradients.
SCALE_FREE = (*ADAM, "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta")
MOMENT_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "dtype", "numel", "nan", "pos_inf", "zero", "subnormal"),
    *("amax", "sum", "sum_sq", "exp_lo", "exp_hist", "scale", "format"),
)


@dataclass(frozen=True)
class Held:
    """One recorded tensor; limits for a gradient are without the loss scale."""

    module_class: str
    dtype: str
    numel: int
    zero: int
    subnormal: int
    sum: float
    sum_sq: float
    histogram: ExponentHistogram
    #: Divisor of the histogram's magnitudes: the loss scale.
    scale: float = 1.0
    #: What quantised state is stored in, with a scale per block; empty for state that lies in memory as it is.
    stored: str = ""

    @property
    def without_sign(self) -> bool:
        """Whether no element is far below zero: the sum is at least that of the magnitudes' lower ends."""
        exponents = np.arange(self.histogram.lo, self.histogram.lo + self.histogram.counts.size, dtype=np.float64)
        return self.sum >= 0.999 * float((self.histogram.counts * np.exp2(exponents)).sum())

    def at_most(self, limit: float) -> float:
        """Least number of non-zero elements that are at most ``limit``."""
        return self.histogram.at_most(limit * self.scale).low

    def certainly_above(self, limit: float) -> float:
        """Least number of elements above ``limit``."""
        return self.histogram.total - self.histogram.at_most(limit * self.scale).high


@dataclass(frozen=True)
class Moment:
    """The second moment of a parameter after a step, and the gradient of that step."""

    process: Process
    step: int
    #: Name of the row, such as ``weight.exp_avg_sq``.
    name: str
    held: Held
    gradient: Held


def is_second_moment(state: str) -> bool:
    """Whether a state is called as means or sums of squared gradients are."""
    return state in SECOND_MOMENTS or _OTHER_NAMES.search(state.lower()) is not None


def second_moments(view: RunView) -> Mapping[Parameter, list[Moment]]:
    """Finite second moments with a finite gradient of the same step: by parameter, in order of steps."""
    return view.remember("second-moments", lambda: _second_moments(view))


def _second_moments(view: RunView) -> dict[Parameter, list[Moment]]:
    held: dict[tuple[Parameter, Process, int], tuple[str, Held]] = {}
    for r in view.scan_records(MOMENT_COLUMNS, ("opt_state",)):
        name, _, key = str(r["name"]).rpartition(".")
        if name and is_second_moment(key) and not r["nan"] and not r["pos_inf"]:
            moment = held_in(r)
            if moment.without_sign:
                held[_key(r, name)] = (str(r["name"]), moment)
    gradients: dict[tuple[Parameter, Process, int], Held] = {}
    for r in view.scan_records(MOMENT_COLUMNS, ("weight_grad_step",), steps=sorted({step for *_, step in held})):
        of = _key(r, str(r["name"]))
        if of in held and not r["nan"] and not r["pos_inf"]:
            gradients[of] = held_in(r)
    found: dict[Parameter, list[Moment]] = {}
    for owner, process, step in sorted(held.keys() & gradients.keys()):
        at = owner, process, step
        found.setdefault(owner, []).append(Moment(process, step, *held[at], gradients[at]))
    return found


def _key(r: Mapping[str, Any], name: str) -> tuple[Parameter, Process, int]:
    return parameter_of({**r, "name": name}), *process_step(r)


def held_in(r: Mapping[str, Any]) -> Held:
    """From a record with :data:`MOMENT_COLUMNS`."""
    return Held(
        module_class=text(r["module_class"]),
        dtype=str(r["dtype"]),
        numel=int(r["numel"]),
        zero=integer(r["zero"]) or 0,
        subnormal=integer(r["subnormal"]) or 0,
        sum=number(r["sum"]) or 0.0,
        sum_sq=number(r["sum_sq"]) or 0.0,
        histogram=ExponentHistogram.of(integer(r["exp_lo"]), r["exp_hist"]),
        scale=number(r["scale"]) or 1.0,
        stored=text(r["format"]),
    )


def excess(moments: Sequence[Moment], decay: float) -> float | None:
    """Mean of v at the last of these steps over its mean in exact arithmetic.

    The mean over elements of ``v = decay v + (1 - decay) g^2`` follows the same recursion with the mean of g^2, which
    the rows hold; between recorded steps it is interpolated by the mean of both ends. None with fewer than two steps.
    """
    first = moments[0]
    exact = first.held.sum / first.held.numel
    for before, after in pairwise(moments):
        remembered = decay ** (after.step - before.step)
        exact = remembered * exact + (1.0 - remembered) * 0.5 * (_mean_square(before) + _mean_square(after))
    last = moments[-1]
    return last.held.sum / last.held.numel / exact if len(moments) > 1 and exact > 0.0 else None


def _mean_square(moment: Moment) -> float:
    return moment.gradient.sum_sq / moment.gradient.numel / moment.gradient.scale**2


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


def label(owner: Parameter) -> str:
    """The parameter's full name below its root."""
    return parameter_label(*owner)
