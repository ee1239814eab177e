"""The updates of the loss scaler, read from the ``steps`` table: one for each ``scaler.update()``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.survey.arrow_rows import records
from precdoctor.diagnosis.survey.loss_scales import has_several_scalers
from precdoctor.diagnosis.survey.rows import integer, number, text
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
    attempts = [_attempt(r) for r in records(mine) if number(r.get("complete")) != 0.0]
    overflows = Counter[str]()
    for name, update in attempts:
        if update.scale is not None:
            overflows[name] += update.overflow
    if overflows and has_several_scalers(view, process):
        chosen = max(overflows, key=overflows.__getitem__)
        attempts = [(name, update) for name, update in attempts if name == chosen]
    groups: list[list[tuple[str, Update]]] = []
    for name, update in attempts:
        if groups and _same_update(groups[-1], name, update):
            groups[-1].append((name, update))
        else:
            groups.append([(name, update)])
    return [_merged([update for _, update in group]) for group in groups]


def _attempt(record: dict[str, object]) -> tuple[str, Update]:
    """Convert a row of the ``steps`` table to the optimizer's name and an update of one attempt."""
    norm = number(record.get("grad_norm"))
    found, scale = number(record.get("found_inf")), number(record.get("loss_scale"))
    loss_is_bad = bool(record["loss_is_bad"])
    bad = number(record.get("non_finite")) not in (None, 0.0)
    update = Update(
        step=int(number(record["step"]) or 0),
        last=int(number(record["step"]) or 0),
        scale=scale if scale is not None and 0.0 <= scale < math.inf else None,
        growth_tracker=integer(record.get("growth_tracker")),
        overflow=found > 0.0 if found is not None else bad or loss_is_bad,
        forward=loss_is_bad,
        grad_norm=norm if norm is not None and 0.0 <= norm < math.inf else None,
        sampled=number(record.get("sampled")) == 1.0,
    )
    return text(record.get("optimizer")), update


def _same_update(group: Sequence[tuple[str, Update]], name: str, update: Update) -> bool:
    """Return whether no ``update()`` was called in between: another optimizer, and the scaler's state unchanged."""
    _, last = group[-1]
    if update.scale is None or update.growth_tracker is None or name in {n for n, _ in group}:
        return False
    return (update.scale, update.growth_tracker) == (last.scale, last.growth_tracker)


def _merged(parts: Sequence[Update]) -> Update:
    norms = [p.grad_norm for p in parts if p.grad_norm is not None]
    return Update(
        step=parts[0].step,
        last=parts[-1].last,
        scale=parts[0].scale,
        growth_tracker=parts[0].growth_tracker,
        overflow=any(p.overflow for p in parts),
        forward=any(p.forward for p in parts),
        grad_norm=max(norms, default=None),
        sampled=all(p.sampled for p in parts),
    )


def recorded_policy(view: RunView, process: Process) -> ScalerPolicy | None:
    """Return the policy of the first enabled scaler with complete settings in ``rank.json``; None without one."""
    for scaler in view.facts(process).get("scalers") or ():
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        settings = [value for name in names if (value := number(scaler.get(name))) is not None]
        if scaler.get("enabled") is False or len(settings) < len(names):
            continue
        init, growth, backoff, interval = settings
        try:
            return ScalerPolicy(init=init, growth=growth, backoff=backoff, interval=int(interval))
        except (ValueError, OverflowError):  # no scaler can have these settings: the log is damaged
            return None
    return None
