"""Rows of the steps table, and events that follow from a step's numbers: scaler changes, non-finite steps."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from precdoctor.recording.output.tensor_table import StepTensors
from precdoctor.recording.slots.deferred import read
from precdoctor.recording.slots.step_batch import StepBatch, StepFacts, looks_like_a_scale
from precdoctor.runlog.atomic import jsonable
from precdoctor.runlog.caps import shortened
from precdoctor.runlog.writer import MAX_STRING_BYTES

Row = dict[str, Any]
#: Enough for a run that stays broken.
_MAX_NONFINITE_EVENTS = 100
_TENSORS_NAMED = 8

# --- loss scale ------------------------------------------------------------------------------------------------------


class LossScales:
    """The loss scale of each backward pass: a GradScaler's, or a hand-written one inferred from its effects."""

    def __init__(self) -> None:
        #: The scale inferred last; steps that are not sampled have no gradients to compare.
        self._inferred: float | None = None

    def of(self, batch: StepBatch, ratios: Sequence[float]) -> tuple[float | None, bool]:
        """Return the scale of one step (None if there is none), and whether it was inferred.

        Args:
            batch: the step.
            ratios: per parameter, amax of the accumulated gradient over amax of the gradient given to the optimizer.
        """
        facts = batch.facts
        if (known := read(facts.loss_scale)) is not None:
            return known, False
        if facts.left_out:  # no optimizer was given gradients to compare with
            factor = _common_factor(facts.root_factors)
            if factor is not None and (self._inferred is not None or looks_like_a_scale(factor)):
                self._inferred = factor
        elif facts.sampled and facts.complete:
            found = infer_loss_scale(
                facts.root_factors, ratios, clipped=facts.clip_norm is not None, shrunk=_shrunk(facts)
            )
            if found is None and not ratios and self._inferred is not None:
                found = _common_factor(facts.root_factors)  # there is a scale, and it may have changed
            self._inferred = found
        elif self._inferred is not None and (factor := _common_factor(facts.root_factors)) is not None:
            return factor, True
        return self._inferred, self._inferred is not None


class ClipOrders:
    """Whether a script that scales the loss by hand clips before it unscales, per optimizer.

    On sampled steps the norm at the clip is compared with the rows of the same gradients, which carry the scale. Other
    steps have no such rows: their norm was measured at the clip, so it is unscaled if the order on the last sampled
    step says so, and dropped if that order is unknown.
    """

    def __init__(self) -> None:
        self._scaled: dict[str, bool | None] = {}

    def settle(self, facts: StepFacts, tensors: StepTensors, scale: float) -> None:
        """Complete the facts of a step with a clip and a hand-written ``scale``."""
        if facts.clip_norm is None:
            return
        if facts.gradients_of is not None:
            facts.clipped_before_unscale = _scaled_at_clip(facts, tensors, scale)
            self._scaled[facts.optimizer] = facts.clipped_before_unscale
        elif not facts.sampled and facts.optimizer in self._scaled:
            scaled = self._scaled[facts.optimizer]
            facts.grad_norm_scaled = scaled is True
            if scaled is None and math.isfinite(read(facts.grad_amax) or 0.0):
                facts.grad_norm = None


def _scaled_at_clip(facts: StepFacts, tensors: StepTensors, scale: float) -> bool | None:
    """Return whether gradients carried ``scale`` as they were clipped; None if unknown.

    Reductions between ranks change the norm after the backward pass, but by much less than the scale.
    """
    if facts.norm_at_clip is None or scale < 2:
        return None
    norm, (squares, finite) = read(facts.norm_at_clip[0]), tensors.weight_gradients(facts.norm_at_clip[1])
    if not norm or not math.isfinite(norm) or not finite or not (before := math.sqrt(_exact_sum(squares))):
        return None
    divided = math.log(before / norm) / math.log(scale)  # 0: not yet, 1: by the scale
    return None if 0.25 < divided < 0.75 else divided <= 0.25


def _shrunk(facts: StepFacts) -> float | None:
    """Return the factor by which a clip of the norm divided the gradients; 1 without a clip, None if unknown."""
    if facts.clip_norm is None:
        return 1.0
    norm = read(facts.norm_at_clip[0]) if facts.norm_at_clip is not None else None
    return max(1.0, norm / facts.clip_norm) if norm and facts.clip_norm else None


def infer_loss_scale(
    root_factors: Sequence[float], ratios: Sequence[float], *, clipped: bool, shrunk: float | None = None
) -> float | None:
    """Infer a hand-written constant loss scale; None if there is no evidence of one.

    Evidence is a constant factor at the root of the backward pass (``loss * 65536``) by which gradients are divided
    before the step; what a clip of known norms divides is taken out. A power of two from 16 up needs less, because
    losses are weighted by other numbers: no ratios (FP32 master copies are other tensors), a median ratio of at least
    the factor with clipping, which divides once more, or of a quarter of it without, because averaging over ranks
    changes each ratio. Without a factor of at least 2, a division of several unclipped gradients by one such power is
    evidence.

    Args:
        root_factors: factors seen at the roots of this step's backward passes.
        ratios: see :meth:`LossScales.of`; empty if no parameter had both gradients.
        clipped: whether gradients were clipped.
        shrunk: the factor by which the clip divided them, before or after unscaling; None if it is unknown.
    """
    factor = _common_factor(root_factors)
    if not ratios:
        return factor if factor is not None and looks_like_a_scale(factor) else None
    middle = statistics.median(ratios)
    spread = max(abs(r / middle - 1.0) for r in ratios)
    if factor is not None and factor >= 2:  # a ratio is accurate to a percent, so not for factors near one
        shrunk = shrunk if clipped else 1.0
        if shrunk is not None and spread < 0.02 and abs(middle / shrunk / factor - 1.0) < 0.01:
            return factor
        lowest = factor * (0.99 if clipped else 0.25)
        return factor if looks_like_a_scale(factor) and middle >= lowest else None
    nearest = 2.0 ** round(math.log2(middle))
    exact = spread < 1e-3 and abs(middle / nearest - 1.0) < 1e-4 and len(ratios) > 1
    return nearest if exact and looks_like_a_scale(nearest) and not clipped else None


def _common_factor(factors: Sequence[float]) -> float | None:
    return factors[0] if factors and len(set(factors)) == 1 else None


# --- steps -----------------------------------------------------------------------------------------------------------


def step_row(batch: StepBatch, tensors: StepTensors, rank: int, scale: float | None) -> Row:
    """Return the steps row."""
    facts = batch.facts
    found_inf = read(facts.found_inf)
    own = [(scale or 1.0) if i in facts.unscaled_losses else 1.0 for i in range(len(facts.losses))]
    measured = [None if (value := read(loss)) is None else value * s for loss, s in zip(facts.losses, own, strict=True)]
    losses = [value for value in measured if value is not None]
    used = [value for value in measured[facts.thrown_losses :] if value is not None]
    lrs = [value for value in map(read, facts.lrs) if value is not None]
    return {
        "step": facts.step,
        "rank": rank,
        "optimizer": facts.optimizer,
        "complete": facts.complete,
        "wall_time": facts.wall_time,
        "micro_steps": facts.micro_steps,
        "loss": _sum(used or losses, scale),
        "lr": max(lrs, default=None),
        "lrs": lrs,
        "grad_norm": _grad_norm(batch, tensors, scale),
        "clip_norm": facts.clip_norm,
        "clipped_before_unscale": facts.clipped_before_unscale,
        "loss_scale": scale,
        "growth_tracker": None if (tracker := read(facts.growth_tracker)) is None else int(tracker),
        "found_inf": None if found_inf is None else found_inf > 0,
        "skipped": facts.left_out or (bool(found_inf) if found_inf is not None else facts.not_reached),
        "autocast_dtype": facts.autocast_dtype,
        "lost_update_fraction": _lost_updates(tensors),
        "non_finite": _non_finite(tensors, losses) + _bad_sentinel(batch),
        "sampled": facts.sampled,
        "recorder_ns": max(0, facts.recorder_ns + facts.scan_ns),  # an interrupt may keep one half of an account
        "wait_ns": facts.wait_ns,
        "step_ns": facts.step_ns,
    }


def _sum(losses: list[float], scale: float | None) -> float | None:
    """Sum losses, divided by the loss scale. Non-finite if one of them is; None without losses."""
    if losses and all(map(math.isfinite, losses)):
        return _exact_sum(losses) / (scale or 1.0)
    return sum(losses) if losses else None


def _exact_sum(values: list[float]) -> float:
    """Sum with one rounding; infinite beyond FP64, where ``math.fsum`` raises."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _grad_norm(batch: StepBatch, tensors: StepTensors, scale: float | None) -> float | None:
    """Return the gradient norm without the loss scale; NaN if a gradient is non-finite, None if unknown.

    Computed from the rows of the optimizer's own parameters if every gradient has one; else measured by the sentinel.
    """
    own = batch.facts.gradients_of
    if own is None:
        norm, amax = read(batch.facts.grad_norm), read(batch.facts.grad_amax)
        if norm is None:
            return None
        if not math.isfinite(norm if amax is None else amax):  # a library that gives the norm gives no amax
            return math.nan
        return norm / ((scale or 1.0) if batch.facts.grad_norm_scaled else 1.0)
    squares, finite = tensors.weight_gradients(own)
    if not finite:
        return math.nan
    return math.sqrt(_exact_sum(squares)) / (scale or 1.0) if squares else None


def _lost_updates(tensors: StepTensors) -> float | None:
    lost, intended = tensors.lost_updates()
    return lost / intended if intended else None


def _bad_sentinel(batch: StepBatch) -> int:
    """Return 1 if the sentinel found non-finite gradients, because it is unknown how many; else 0."""
    amax = read(batch.facts.grad_amax)
    return int(amax is not None and not math.isfinite(amax))


def _non_finite(tensors: StepTensors, losses: list[float]) -> int:
    """Count the tensors of trigger kinds with a NaN or an Inf, and non-finite losses that have no row."""
    unmeasured = 0 if tensors.of_kinds("loss").any() else sum(not math.isfinite(x) for x in losses)
    return unmeasured + len(tensors.bad_triggers())


class EventLog:
    """Creates the events rows of one rank."""

    def __init__(self, rank: int, *, redact: bool) -> None:
        self._rank = rank
        self._redact = redact
        self._count = 0
        self._last_scale: float | None = None
        self._inferred: float | None = None
        self._nonfinite = 0

    def rows(self, events: Iterable[dict[str, Any]]) -> list[Row]:
        """Return events rows: numbered, with their data as JSON, and redacted if asked for."""
        out = []
        for event in events:
            row = {"time_ns": time.time_ns(), "id": f"{self._rank}-{self._count}", **event, "rank": self._rank}
            data = event.get("data", {})
            if self._redact and "made_at" in data:
                data = {**data, "made_at": [{"line": made["line"]} for made in data["made_at"]]}
            row["data"] = json.dumps(jsonable(data), default=str)
            if len(row["data"]) > MAX_STRING_BYTES:
                row["data"] = json.dumps({"cut": len(row["data"])})  # ASCII; cutting it would leave invalid JSON
            if self._redact:
                row["code"] = None
            out.append({k: shortened(v) if k != "data" and type(v) is str else v for k, v in row.items()})
            self._count += 1
        return out

    def of_step(
        self, batch: StepBatch, bad: Sequence[tuple[str, str, str, str]], step: Row, inferred_scale: float | None
    ) -> list[Row]:
        """Return the events that follow from a finished step's numbers.

        Args:
            bad: root, module, kind and name of the tensors with a NaN or an Inf that count as an incident.
            step: its steps row.
            inferred_scale: the loss scale, if it is not a scaler's.
        """
        events: list[dict[str, Any]] = []
        number = batch.facts.step
        scale = step["loss_scale"]
        if inferred_scale is not None:
            if inferred_scale != self._inferred:
                self._inferred = inferred_scale
                events.append(_event("scaler", number, {"change": "inferred", "from": None, "to": inferred_scale}))
        elif scale is not None:
            if self._last_scale is not None and scale != self._last_scale:
                change = "backoff" if scale < self._last_scale else "growth"
                events.append(_event("scaler", number, {"change": change, "from": self._last_scale, "to": scale}))
            self._last_scale = scale
        if step["clipped_before_unscale"]:
            data = {"clip_norm": step["clip_norm"], "before_unscale": True}
            events.append(_event("clip", number, data))
        if step["non_finite"] and self._nonfinite < _MAX_NONFINITE_EVENTS:
            self._nonfinite += 1
            events.append(_nonfinite_event(batch, bad, step))
        return self.rows(events)


def _nonfinite_event(batch: StepBatch, bad: Sequence[tuple[str, str, str, str]], step: Row) -> dict[str, Any]:
    named = [f"{root}/{module}:{kind}:{name}" for root, module, kind, name in bad[:_TENSORS_NAMED]]
    kinds = {kind for _, _, kind, _ in bad}
    if step["loss"] is not None and not math.isfinite(step["loss"]):
        kinds.add("loss")
    # An unsampled step has no rows: unless the loss is non-finite, it was the check of the gradients that failed.
    data = {"kinds": sorted(kinds) or ["weight_grad"], "tensors": named, "count": len(bad)}
    file, line = batch.facts.backward_file, batch.facts.backward_line
    return {**_event("nonfinite", batch.facts.step, data), "file": file, "line": line}


def _event(kind: str, step: int | None, data: dict[str, Any]) -> dict[str, Any]:
    return {"event": kind, "step": step, "data": data}
