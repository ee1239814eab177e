"""A row of the ``steps`` table as a typed value, and an optimizer's own count of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.diagnosis.survey.rows import integer, number, text


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of one process, all its optimizers merged; the columns of the ``steps`` table."""

    step: int
    loss: float | None
    non_finite: int
    skipped: bool
    complete: bool
    sampled: bool
    loss_scale: float | None
    lr: float | None
    loss_is_bad: bool
    #: Class and number of the optimizer that made the attempt: ``AdamW#0``.
    optimizer: str = ""
    #: Number of backward passes; 0 if the step used the gradients of the step before again.
    micro_steps: int = 1
    #: L2 norm of the rank's own gradients, unscaled, before clipping.
    grad_norm: float | None = None
    clip_norm: float | None = None
    clipped_before_unscale: bool | None = None
    growth_tracker: int | None = None
    autocast_dtype: str | None = None
    found_inf: bool | None = None  # whether the loss scaler found one in this optimizer's gradients
    #: Number and learning rate of each parameter group whose rate is NaN or infinite.
    bad_rates: tuple[tuple[int, float], ...] = ()

    #: The learning rate of each parameter group; NaN if it is not recorded.
    lrs: tuple[float, ...] = ()

    @property
    def inference(self) -> bool:
        """Whether the step only called a model, without training it (``record --inference``)."""
        return self.complete and not self.optimizer and not self.micro_steps


def norms_of(steps: Iterable[StepFacts]) -> list[float]:
    """Return the known gradient norms, in order."""
    return [s.grad_norm for s in steps if s.grad_norm is not None]


def losses_of(steps: Iterable[StepFacts]) -> list[float]:
    """Return the known losses, in order."""
    return [s.loss for s in steps if s.loss is not None]


def _flag(value: Any) -> bool:
    return number(value) not in (None, 0.0)


def step_facts(record: Mapping[str, Any]) -> StepFacts:
    """Convert one row of ``RunView.steps``."""
    rates = record.get("lrs")
    rates = rates if isinstance(rates, (list, np.ndarray)) else ()
    return StepFacts(
        step=int(record["step"]),
        loss=number(record.get("loss")),
        non_finite=integer(record.get("non_finite")) or 0,
        skipped=_flag(record.get("skipped")),
        complete=_flag(record.get("complete")),
        sampled=_flag(record.get("sampled")),
        loss_scale=number(record.get("loss_scale")),
        lr=number(record.get("lr")),
        loss_is_bad=bool(record["loss_is_bad"]),
        optimizer=text(record.get("optimizer")),
        micro_steps=1 if (micro_steps := integer(record.get("micro_steps"))) is None else micro_steps,
        grad_norm=number(record.get("grad_norm")),
        clip_norm=number(record.get("clip_norm")),
        clipped_before_unscale=None if (early := number(record.get("clipped_before_unscale"))) is None else early != 0,
        growth_tracker=integer(record.get("growth_tracker")),
        autocast_dtype=text(record.get("autocast_dtype")) or None,
        found_inf=None if (found := number(record.get("found_inf"))) is None else found != 0,
        bad_rates=tuple((i, float(r)) for i, r in enumerate(rates) if r is not None and not math.isfinite(r)),
        lrs=tuple(math.nan if r is None else float(r) for r in rates),
    )


def own_step(steps: Sequence[StepFacts], step: int, before: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the optimizer of a step, and how many steps that optimizer had made before it, earlier runs included.

    Args:
        steps: all steps of one process, in order.
        step: the number of one of them.
        before: per optimizer its steps before this process.

    Returns:
        None if a single optimizer began at step 0, so that its count is the run's, or if earlier steps are missing.
    """
    until, names = steps[: step + 1], {s.optimizer for s in steps if s.optimizer}
    if len(until) <= step or until[-1].step != step or (len(names) < 2 and not before):
        return None
    name = until[-1].optimizer
    return (name, before.get(name, 0) + sum(s.optimizer == name for s in until) - 1) if name else None


def merged_facts(a: StepFacts, b: StepFacts) -> StepFacts:
    """Merge two rows of one step, which belong to two optimizers; ``lrs`` is left empty."""
    return StepFacts(
        step=a.step,
        loss=a.loss if a.loss is not None else b.loss,
        non_finite=max(a.non_finite, b.non_finite),
        skipped=a.skipped or b.skipped,
        complete=a.complete and b.complete,
        sampled=a.sampled or b.sampled,
        loss_scale=b.loss_scale if b.loss_scale is not None else a.loss_scale,
        lr=max((x for x in (a.lr, b.lr) if x is not None), default=None),
        loss_is_bad=a.loss_is_bad or b.loss_is_bad,
        optimizer=a.optimizer or b.optimizer,
        micro_steps=max(a.micro_steps, b.micro_steps),
        grad_norm=a.grad_norm if a.grad_norm is not None else b.grad_norm,
        clip_norm=a.clip_norm if a.clip_norm is not None else b.clip_norm,
        clipped_before_unscale=a.clipped_before_unscale or b.clipped_before_unscale,
        growth_tracker=b.growth_tracker if b.growth_tracker is not None else a.growth_tracker,
        autocast_dtype=a.autocast_dtype or b.autocast_dtype,
        found_inf=a.found_inf or b.found_inf,
        bad_rates=a.bad_rates or b.bad_rates,
    )
