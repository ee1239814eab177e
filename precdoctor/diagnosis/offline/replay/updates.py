"""The updates of the loss scaler, read from the ``steps`` table: one for each ``scaler.update()``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precdoctor.diagnosis.analyses.loss_scales import attempts_by_update, enabled_scalers, has_several_scalers
from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.rows import number
from precdoctor.diagnosis.survey.step_facts import StepFacts, step_facts
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.loss_scaling import ScalerPolicy


@dataclass(frozen=True)
class Update:
    """One update of the scaler, or one step of a run without a scaler.

    Attributes:
        step: the first step attempt since the update before.
        last: the last attempt; several optimizers may share a scaler.
        scale: the loss scale of these attempts; None without one.
        growth_tracker: before the update; None if unknown.
        overflow: whether the gradients of at least one optimizer held a NaN or Inf.
        forward: whether the loss itself was non-finite, so that no scale would have helped.
        grad_norm: largest L2 norm of an optimizer's unscaled gradients; None if unknown or non-finite.
        sampled: whether every attempt was sampled.
    """

    step: int
    last: int
    scale: float | None
    growth_tracker: int | None
    overflow: bool
    forward: bool
    grad_norm: float | None
    sampled: bool


def updates_of(view: RunView, process: Process) -> list[Update]:
    """Return the scaler updates of one process in order; without a step that was cut off.

    Several scalers are assumed to have one optimizer each; only the one that overflowed most often is returned.
    """
    steps = view.steps
    mine = steps[(steps["rank"] == process.rank) & (steps["attempt"] == process.attempt)]
    attempts = [s for s in map(_attempt, records(mine)) if s.complete]
    overflows = Counter[str]()
    for s in attempts:
        if s.loss_scale is not None:
            overflows[s.optimizer] += _overflowed(s)
    if overflows and has_several_scalers(view, process):
        chosen = max(overflows, key=overflows.__getitem__)
        attempts = [s for s in attempts if s.optimizer == chosen]
    return [_update(group) for group in attempts_by_update(attempts)]


def _attempt(record: Mapping[str, Any]) -> StepFacts:
    """Convert a row of the ``steps`` table; without a loss scale that no scaler can have."""
    facts = step_facts(record)
    known = facts.loss_scale is None or 0.0 <= facts.loss_scale < math.inf
    return facts if known else replace(facts, loss_scale=None)


def _overflowed(attempt: StepFacts) -> bool:
    if attempt.found_inf is not None:
        return attempt.found_inf
    return attempt.non_finite != 0 or attempt.loss_is_bad


def _update(attempts: Sequence[StepFacts]) -> Update:
    norms = [s.grad_norm for s in attempts if s.grad_norm is not None and 0.0 <= s.grad_norm < math.inf]
    return Update(
        step=attempts[0].step,
        last=attempts[-1].step,
        scale=attempts[0].loss_scale,
        growth_tracker=attempts[0].growth_tracker,
        overflow=any(map(_overflowed, attempts)),
        forward=any(s.loss_is_bad for s in attempts),
        grad_norm=max(norms, default=None),
        sampled=all(s.sampled for s in attempts),
    )


def recorded_policy(view: RunView, process: Process) -> ScalerPolicy | None:
    """Return the policy of the first enabled scaler with complete settings in ``rank.json``; None without one."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    for scaler in enabled_scalers(view, process):
        settings = [value for name in names if (value := number(scaler.get(name))) is not None]
        if len(settings) < len(names):
            continue
        init, growth, backoff, interval = settings
        try:
            return ScalerPolicy(init=init, growth=growth, backoff=backoff, interval=int(interval))
        except (ValueError, OverflowError):  # no scaler can have these settings: the log is damaged
            return None
    return None
