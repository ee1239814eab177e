"""Replays a recorded run with another loss scaler, and finds the layers that make it back off."""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.diagnosis.offline.replay.gradients import KINDS, RunGradients, run_gradients
from precdoctor.diagnosis.offline.replay.updates import recorded_policy
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, TensorRow, known_format
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.errors import NothingRecordedError, UsageError
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.formats import FP16, Format
from precdoctor.numerics.loss_scaling import (
    PolicyScore,
    ScalerPolicy,
    ScalerReplay,
    ScalerState,
    search,
    simulate,
)

#: Most overflows whose culprits are searched, evenly spread.
EXAMINED = 16


@dataclass(frozen=True)
class Culprit:
    """The tensor that makes the scaler back off.

    Attributes:
        scale: the simulated loss scale at that step.
        how: ``recorded``: the first non-finite tensor of the step, in execution order. ``predicted``: the first tensor
            that exceeds its format at the simulated scale. ``nearest sample``: no row of the step shows an overflow;
            the tensor with the least headroom on the last sampled step before that did not overflow.
        forward: whether it overflows in the forward pass, which no loss scale prevents.
        headroom_binades: at the simulated scale, negative beyond the format; None if the tensor is non-finite.
    """

    step: int
    scale: float
    root: str
    module: str
    kind: str
    name: str
    how: str
    forward: bool
    headroom_binades: float | None


@dataclass(frozen=True)
class LossScaleReplay:
    """A recorded run replayed with another loss scaler.

    Attributes:
        run: the scaler updates of the replayed process, and their gradients.
        used: the run's own policy; None if unknown.
        recorded_scales: the recorded scale at each update; None without one.
        recorded_flushed: mean flushed share on the run's own sampled steps without overflow; None without such a step,
            and if the gradients are hypothetical.
        replay: the simulation of the given policy, or of the best one.
        ideal: for each update the largest power of two without overflow.
        scores: after a search the best policy, the best of each other interval, and torch's default; else empty.
        culprits: the tensors behind the examined overflows of the simulation.
        notes: limitations, in sentences.
    """

    run: RunGradients
    used: ScalerPolicy | None
    recorded_scales: tuple[float | None, ...]
    recorded_overflows: tuple[int, ...]
    recorded_flushed: Estimate | None
    replay: ScalerReplay
    ideal: tuple[Estimate, ...]
    scores: tuple[PolicyScore, ...]
    culprits: tuple[Culprit, ...]
    overflows: int
    notes: tuple[str, ...]


def replay_loss_scale(view: RunView, policy: ScalerPolicy | None = None, *, fmt: Format = FP16) -> LossScaleReplay:
    """Replay the log of the first process with a loss scale (or else of the first) with another loss scaler.

    The gradients are the recorded ones: a run that skips other steps would train differently afterwards, which is not
    predicted.

    Args:
        policy: the scaler; None searches the best initial scale and growth interval.

    Raises:
        NothingRecordedError: the run has no complete training step.
    """
    chosen = default_process(view)
    run = run_gradients(view, chosen, fmt)
    if not run.updates:
        raise NothingRecordedError(f"{view.run.origin} holds no complete training step; nothing can be replayed")
    used = recorded_policy(view, chosen)
    scores: tuple[PolicyScore, ...] = ()
    if policy is None:
        scores = tuple(_scores_to_report(search(run.gradients, base=used)))
        policy = scores[0].policy
    replayed = simulate(policy, run.gradients, start=_recorded_start(run) if policy == used and not scores else None)
    return LossScaleReplay(
        run=run,
        used=used,
        recorded_scales=tuple(u.scale for u in run.updates),
        recorded_overflows=tuple(u.step for u in run.updates if u.overflow),
        recorded_flushed=recorded_flushed(run),
        replay=replayed,
        ideal=tuple(g.limit.ideal for g in run.gradients),
        scores=scores,
        culprits=culprits(view, run, replayed),
        overflows=len(replayed.overflow_steps),
        notes=tuple(_notes(view, run)),
    )


def _scores_to_report(scores: list[PolicyScore]) -> list[PolicyScore]:
    """Select the policies to report: the best of each growth interval, and torch's default."""
    chosen: dict[int, PolicyScore] = {}
    for score in scores:
        chosen.setdefault(score.policy.interval, score)
    stock = [s for s in scores if (s.policy.init, s.policy.interval) == (ScalerPolicy.init, ScalerPolicy.interval)]
    return [*chosen.values(), *(s for s in stock if s not in chosen.values())]


def recorded_flushed(run: RunGradients) -> Estimate | None:
    """Return the mean flushed share on the run's sampled steps without overflow; None without, or if hypothetical."""
    if run.hypothetical:
        return None
    clean = [(g, u) for g, u in zip(run.gradients, run.updates, strict=True) if not u.overflow and u.scale != 0.0]
    known = [share for g, u in clean if (share := g.flushed(u.scale or 1.0)) is not None]
    return Estimate.mean(known) if known else None


def used_policy(view: RunView) -> ScalerPolicy:
    """Return the policy of the run's own scaler.

    Raises:
        UsageError: the log names no scaler.
    """
    policy = recorded_policy(view, default_process(view))
    if policy is None:
        raise UsageError(f"{view.run.origin} names no GradScaler; say which loss scaler to replay, or best")
    return policy


def default_process(view: RunView) -> Process:
    """Return the first process with a loss scale, or else the first.

    Raises:
        NothingRecordedError: the run has no process.
    """
    if not view.processes:
        raise NothingRecordedError(f"{view.run.origin} holds no rank; nothing can be replayed")
    scaled = (p for p, steps in view.timeline.items() if any(s.loss_scale is not None for s in steps))
    return next(scaled, view.processes[0])


def _recorded_start(run: RunGradients) -> ScalerState | None:
    """Return the scaler's recorded first state, because a resumed run does not begin at the initial scale; None if
    unknown.
    """
    first = run.updates[0]
    if first.scale is None or first.growth_tracker is None:
        return None
    return ScalerState(first.scale, first.growth_tracker)


# -- culprits ---------------------------------------------------------------------------------------------------------


def culprits(view: RunView, run: RunGradients, replayed: ScalerReplay) -> tuple[Culprit, ...]:
    """Find the tensors behind the overflows of a simulation, at most :data:`EXAMINED` of them."""
    overflows = [i for i, s in enumerate(replayed.steps) if s.overflow]
    chosen = overflows[:: max(1, math.ceil(len(overflows) / EXAMINED))]
    found = (_culprit(view, run, i, replayed.steps[i].scale) for i in chosen)
    return tuple(c for c in found if c is not None)


def _culprit(view: RunView, run: RunGradients, i: int, scale: float) -> Culprit | None:
    """Find the tensor behind the overflow of update ``i`` at a scale; see :attr:`Culprit.how`. None if unknown."""
    update = run.updates[i]
    if (rows := _rows_of(view, run, i)) and update.overflow:
        bad = [r for r in rows if r.bad and (r.kind in KINDS or (r.kind in FORWARD_KINDS and not r.mask_like))]
        if bad:
            return _culprit_of(min(bad, key=lambda r: r.position), update.step, scale, "recorded", None)
    held = [(headroom, r) for r in rows if (headroom := _headroom(r, run, i, scale)) is not None]
    beyond = [r for headroom, r in held if headroom <= 0.0]
    if beyond:
        first = min(beyond, key=lambda r: r.position)
        return _culprit_of(first, update.step, scale, "predicted", _headroom(first, run, i, scale))
    for j in range(i - 1, -1, -1):
        if run.updates[j].sampled and not run.updates[j].overflow:
            near = [(h, r) for r in _rows_of(view, run, j) if (h := _headroom(r, run, j, scale)) is not None]
            if near:
                headroom, row = min(near, key=lambda n: (n[0], n[1].position))
                return _culprit_of(row, update.step, scale, "nearest sample", headroom)
            break
    return None


def _rows_of(view: RunView, run: RunGradients, i: int) -> list[TensorRow]:
    """Return the forward and gradient rows of an update, over all its attempts in order."""
    update = run.updates[i]
    rows = [r for step in range(update.step, update.last + 1) for r in view.rows(run.process, step)]
    return [r for r in rows if r.kind in (*KINDS, *FORWARD_KINDS) and r.phase != "recompute"]


def _headroom(row: TensorRow, run: RunGradients, i: int, scale: float) -> float | None:
    """Return a gradient's headroom at another loss scale, in binades; None for other rows and if amax is not known."""
    if row.kind not in KINDS or not row.amax:
        return None
    own = known_format(row.dtype)
    fmt = run.format if run.hypothetical or own is None else own
    if own is not None and own.bits > run.format.bits and not run.hypothetical and row.kind == "weight_grad":
        fmt = run.format  # autocast computed it in the format of the module's activations
    carried = row.scale or run.updates[i].scale or 1.0
    if not (0.0 < row.amax < math.inf and 0.0 < carried < math.inf and scale > 0.0):
        return None
    return math.log2(fmt.overflow_limit) - math.log2(row.amax) - math.log2(scale / carried)


def _culprit_of(row: TensorRow, step: int, scale: float, how: str, headroom: float | None) -> Culprit:
    forward = row.kind in FORWARD_KINDS
    return Culprit(step, scale, row.root, row.module, row.kind, row.name, how, forward, headroom)


# -- limitations ------------------------------------------------------------------------------------------------------


def _notes(view: RunView, run: RunGradients) -> list[str]:
    notes = []
    if run.hypothetical:
        notes.append(
            f"No recorded gradient is in {run.format.name}: all are taken as if they were, and gradients inside "
            "modules, which are not recorded, as no larger than those outside."
        )
    if between := len(run.updates) - run.sampled:
        notes.append(
            f"{between} of {len(run.updates)} steps were not sampled: their amax is estimated from the gradient norm "
            f"on {run.bounded} of them, and what is flushed is not known there."
        )
    if len({p.rank for p in view.processes}) > 1:
        notes.append(f"The loss scale is that of rank {run.process.rank}; gradients are those of all ranks.")
    attempts = len({p.attempt for p in view.processes})
    if attempts > 1:
        notes.append(f"Attempt {run.process.attempt + 1} of {attempts} is replayed; the others are runs of their own.")
    if view.missing:
        notes.append(f"Some of the log is missing: {view.missing}.")
    return notes
