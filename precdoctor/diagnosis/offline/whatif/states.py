"""Predicts what optimizer states would lose in a narrower format, and how that changes the size of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.diagnosis.analyses.optimizer_states import is_second_moment
from precdoctor.diagnosis.analyses.parameters import beta2_of, parameter_groups, parameter_label
from precdoctor.diagnosis.offline.whatif.forecast import Answer, Forecast, Question, forecast
from precdoctor.diagnosis.offline.whatif.recipe import Recipe
from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.runlog.reader import Run

#: The default of torch.optim.Adam, AdamW and RMSprop.
_USUAL_EPS, _USUAL_BETA2 = 1e-8, 0.999
#: Magnitudes per binade at which the rounding is computed.
_POINTS = 32


@dataclass(frozen=True)
class StepEffect:
    """The change of an update's factor ``1 / (sqrt(v) + eps)`` when a second moment v is stored in the format.

    At the worst recorded step.

    Attributes:
        doubled: share of the non-zero elements that are above eps squared and become zero: their update becomes more
            than twice as large.
        longest: largest growth of an update: ``(sqrt(v) + eps) / eps`` at the largest v that becomes zero; 1 without.
        error: RMS of the relative change of the factor over the elements that do not become zero.
    """

    doubled: Estimate
    longest: float
    error: float


@dataclass(frozen=True)
class StateForecast:
    """The prediction for one state of one parameter.

    Attributes:
        parameter: its full name below the root.
        state: the optimizer's name of the state, such as ``exp_avg_sq``.
        forecast: of the state's values, at the worst recorded step.
        effect: on updates; None for states that are no second moment, and if unknown.
    """

    parameter: str
    state: str
    forecast: Forecast
    effect: StepEffect | None


@dataclass(frozen=True)
class StatesAnswer:
    """The predictions for all states, the worst first.

    Attributes:
        answer: the prediction of all states as tensors.
        eps: the largest of all parameter groups.
        longest_after: largest growth of an update if v was flushed to zero before the new squared gradient is added:
            ``1 / sqrt(1 - beta2)``.
        stalls: whether ``v * beta2`` rounds back to v under round to nearest, whatever the scale.
    """

    answer: Answer
    states: tuple[StateForecast, ...]
    eps: float
    longest_after: float
    stalls: bool

    def share(self, of: str) -> float:
        """Return the likely share of elements, each state at its worst step, that are ``flushed`` or ``doubled``.

        ``doubled`` is a share of the elements of second moments only.
        """
        found = elements = 0.0
        for s in self.states:
            if s.forecast.prediction is None or (of == "doubled" and s.effect is None):
                continue
            share = s.effect.doubled.estimate if of == "doubled" and s.effect is not None else s.forecast.flushed
            found += share * s.forecast.prediction.elements
            elements += s.forecast.prediction.elements
        return found / elements if elements else 0.0


def forecast_states(
    run: Run, recipe: Recipe, *, module: str | None = None, steps: tuple[int | None, int | None] = (None, None)
) -> StatesAnswer:
    """Predict every recorded optimizer state.

    Args:
        module: a glob over module names; None for all.
        steps: half-open range.

    Raises:
        UsageError: no state was recorded.
        RunUnreadableError: the log is damaged.
    """
    view = RunView(run)
    groups = parameter_groups(view)
    eps = max((e for g in groups if (e := number(g.get("eps"))) is not None), default=_USUAL_EPS)
    beta2 = max((b for g in groups if (b := beta2_of(g)) is not None), default=_USUAL_BETA2)
    if not view.places("opt_state"):
        raise UsageError(
            "--state: the log holds no optimizer state; record a longer run, of an optimizer that keeps any (Adam)"
        )
    answer = forecast(run, Question(recipe, kinds=("opt_state",), module=module, steps=steps))
    states = [_state(f, recipe, eps) for f in answer.forecasts]
    states.sort(key=lambda s: (-(s.effect.doubled.estimate if s.effect else 0.0), -s.forecast.flushed, s.parameter))
    added = 1.0 - min(max(beta2, 0.0), 1.0)
    stalls = 0.0 < added < 2.0 ** -(recipe.format.mantissa_bits + 2)
    return StatesAnswer(answer, tuple(states), eps, added**-0.5 if added else 1.0, stalls)


def _state(f: Forecast, recipe: Recipe, eps: float) -> StateForecast:
    key = f.seen.key
    own, _, state = key.name.rpartition(".")
    row = f.seen.worst[recipe]
    effect = None
    if row is not None and f.prediction is not None and f.prediction.scale and is_second_moment(state):
        effect = _effect(row, f.prediction.scale, recipe, eps)
    return StateForecast(parameter_label((key.root, key.module, own)), state, f, effect)


def _effect(row: Mapping[str, Any], scale: float, recipe: Recipe, eps: float) -> StepEffect:
    """Compute the effect on updates from one row of a second moment; ``scale`` multiplies v before the cast."""
    held = ExponentHistogram.of(row["exp_lo"], row["exp_hist"]).trimmed()
    total = max(held.total, 1)
    limit = recipe.format.flush_limit / scale
    zero, harmless = held.at_most(limit), held.at_most(min(limit, eps * eps))
    low, high = max(0.0, zero.low - harmless.high), max(0.0, zero.high - harmless.low)
    points, weights = _sample_magnitudes(held, row)
    stored: Floats = np.abs(cast_array(points * scale, recipe.format)) / scale
    lost = stored == 0.0
    doubled = float(weights[lost & (points > eps * eps)].sum())
    largest = min(limit, float(row["amax"])) if zero.high else 0.0
    changes = (np.sqrt(points) + eps) / (np.sqrt(stored) + eps) - 1.0
    kept = float(weights[~lost].sum())
    error = float(np.sqrt((weights[~lost] * changes[~lost] ** 2).sum() / kept)) if kept else 0.0
    return StepEffect(
        Estimate.of(low / total, high / total, doubled / total), (largest**0.5 + eps) / eps if largest else 1.0, error
    )


def _sample_magnitudes(held: ExponentHistogram, row: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """Return sample magnitudes of the elements, log-uniform within each bin, and the number of elements of each."""
    within = (np.arange(_POINTS) + 0.5) / _POINTS
    exponents = np.arange(held.lo, held.lo + held.counts.size)
    points = np.exp2(exponents[:, None] + within[None, :])
    amin, amax = (float(row[name]) if row[name] is not None else None for name in ("amin_nonzero", "amax"))
    points = np.clip(points, amin, amax).ravel()
    return points, np.repeat(held.counts / _POINTS, _POINTS)
