"""From slot rows to log columns, on the drain thread: trimming histograms, unscaling, inferring, counting."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from precdoctor.numerics import EXP_MIN
from precdoctor.recording.batch import StepBatch, read
from precdoctor.recording.kernels import layout as at
from precdoctor.recording.slots import Entry

Row = dict[str, Any]
_INTS = npt.NDArray[np.int64]

#: Gradients of these kinds still carry the loss scale.
_SCALED_KINDS = frozenset(("grad_output", "weight_grad", "loss"))
#: A non-finite tensor of these kinds is an incident; activations alone are evidence (masks are legal).
TRIGGER_KINDS = frozenset(("loss", "weight_grad", "weight", "update"))


def tensor_rows(batch: StepBatch, rank: int) -> list[Row]:
    """The tensors rows of one step, in the order their slots were first used; keys are unique."""
    rows = []
    for entry in batch.entries:
        snapshot = batch.snapshots.get(entry.device)
        if snapshot is None:
            continue
        ints, floats = (t.numpy() for t in snapshot.row(entry.slot))
        if ints[at.LAUNCHES] == 0:
            continue
        rows.append(_row(entry, ints, floats, batch, rank))
    keys = set()
    for row in sorted(rows, key=lambda row: row["phase"] != "train"):
        while (key := (row["root"], row["module"], row["kind"], row["name"], row["call"])) in keys:
            row["call"] += 1  # a call without gradients comes after those with, one in another dtype after the first
        keys.add(key)
    return rows


def _row(entry: Entry, ints: _INTS, floats: npt.NDArray[np.float64], batch: StepBatch, rank: int) -> Row:
    site = entry.site
    first_bad = int(ints[at.FIRST_BAD_ORDER])
    lo, hist = _trim(ints[at.HIST + 1 : at.HIST + at.HIST_WIDTH], EXP_MIN)
    finite = int(hist.sum()) + int(ints[at.HIST])
    row: Row = {
        "step": batch.facts.step,
        "rank": rank,
        "root": site.place.root,
        "module": site.place.module,
        "module_class": site.place.module_class,
        "kind": site.kind,
        "name": site.name,
        "call": site.call,
        "phase": site.phase,
        "dtype": site.dtype,
        "shape": list(entry.shape),
        "numel": int(ints[at.NUMEL]),
        "micro_step": entry.micro_step,
        "first_bad_micro_step": _micro_step(first_bad, entry.device, batch) if first_bad < at.NEVER else None,
        "order": int(ints[at.ORDER]),
        "first_bad_order": first_bad if first_bad < at.NEVER else None,
        "nan": int(ints[at.NAN]),
        "pos_inf": int(ints[at.POS_INF]),
        "neg_inf": int(ints[at.NEG_INF]),
        "zero": int(ints[at.HIST]),
        "subnormal": int(ints[at.SUBNORMAL]),
        "at_max": int(ints[at.AT_MAX]),
        "amax": float(floats[at.AMAX]) if finite else None,
        "amin_nonzero": float(floats[at.AMIN]) if hist.size else None,
        "sum": float(floats[at.SUM]) if finite else None,
        "sum_sq": float(floats[at.SUM_SQ]) if finite else None,
        "exp_lo": lo,
        "exp_hist": hist,
        "fingerprint": int(ints[at.FINGERPRINT]) & 0xFFFF_FFFF_FFFF_FFFF,
        "scaled": site.kind in _SCALED_KINDS or entry.scaled,
    }
    if site.kind == "update":
        row["unchanged"] = int(ints[at.UNCHANGED])
        row["rel_lo"], row["rel_hist"] = _trim(ints[at.REL : at.REL + at.REL_BINS], at.REL_MIN)
    for block in at.BLOCK_SIZES:
        first = at.block_hist(block)
        below = ints[first : first + at.BLOCK_BINS]
        used = np.flatnonzero(below)
        if used.size:
            row[f"block{block}_hist"] = below[: used[-1] + 1]
            peaks = at.block_amax(block)
            row[f"block{block}_amax_lo"], row[f"block{block}_amax_hist"] = _trim(
                ints[peaks + 1 : peaks + at.HIST_WIDTH], EXP_MIN
            )
    return row


def _trim(counts: _INTS, first_bin: int) -> tuple[int | None, _INTS]:
    """Bin number of the first non-empty bin, and the counts from there to the last non-empty one."""
    used = np.flatnonzero(counts)
    if used.size == 0:
        return None, counts[:0]
    return first_bin + int(used[0]), counts[used[0] : used[-1] + 1]


def _micro_step(order: int, device: torch.device, batch: StepBatch) -> int:
    """The micro-step in which the launch with this order number was made."""
    starts = [marks.get(device, 0) for marks in batch.facts.micro_starts]
    return bisect.bisect_left(starts, order)


# --- loss scale ------------------------------------------------------------------------------------------------------


class LossScales:
    """The multiplier each backward pass ran with: a GradScaler's, or a hand-written one inferred from its traces."""

    def __init__(self) -> None:
        #: What the last sampled step gave away; the steps between have no gradients to compare.
        self._inferred: float | None = None

    def of(self, batch: StepBatch, rows: Iterable[Row]) -> tuple[float | None, bool]:
        """The scale of one step (null: none), and whether it was inferred."""
        facts = batch.facts
        known = read(facts.loss_scale)
        if known is not None:
            return known, False
        if facts.sampled and facts.complete:
            clipped = facts.clip_norm is not None
            self._inferred = infer_loss_scale(facts.root_factors, unscale_ratios(rows), clipped=clipped)
        elif self._inferred is not None and (factor := _constant(facts.root_factors)) is not None:
            return factor, True
        return self._inferred, self._inferred is not None


def unscale_ratios(rows: Iterable[Row]) -> list[float]:
    """Per parameter: amax of the accumulated gradient over amax of what the optimizer was given."""
    amax: dict[str, dict[tuple[str, str, str], float]] = {"weight_grad": {}, "weight_grad_step": {}}
    for row in rows:
        if row["kind"] in amax and row["amax"]:
            amax[row["kind"]][row["root"], row["module"], row["name"]] = row["amax"]
    before, after = amax["weight_grad"], amax["weight_grad_step"]
    return [before[key] / after[key] for key in before.keys() & after.keys()]


def infer_loss_scale(root_factors: Sequence[float], ratios: Sequence[float], *, clipped: bool) -> float | None:
    """A hand-written constant loss scale, or null.

    Evidence is a constant factor at the root of the backward pass (``loss * 65536``) and gradients divided by it before
    the step. Clipping divides by one more factor, so the ratio can only be asked to reach it; averaging over ranks
    changes each ratio. Where it cannot be matched, or there is none (FP32 master copies are other tensors),
    the factor counts only as a power of two from 16 up: losses are weighted by other numbers.

    Args:
        root_factors: factors seen at the roots of this step's backward passes.
        ratios: see :func:`unscale_ratios`; empty when no parameter had both gradients.
        clipped: whether the gradients were clipped in this step.
    """
    factor = _constant(root_factors)
    if not ratios:
        return factor if factor is not None and _looks_like_a_scale(factor) else None
    middle = float(np.median(ratios))
    spread = max(abs(r / middle - 1.0) for r in ratios)
    if factor is not None and factor >= 2:  # a ratio is good to a percent, so not for factors near one
        if not clipped and spread < 0.02 and abs(middle / factor - 1.0) < 0.01:
            return factor
        lowest = factor * (0.99 if clipped else 0.25)
        return factor if _looks_like_a_scale(factor) and middle >= lowest else None
    nearest = 2.0 ** round(math.log2(middle))
    exact = spread < 1e-3 and abs(middle / nearest - 1.0) < 1e-4 and len(ratios) > 1
    return nearest if exact and _looks_like_a_scale(nearest) and not clipped else None


def _constant(factors: Sequence[float]) -> float | None:
    return factors[0] if factors and len(set(factors)) == 1 else None


def _looks_like_a_scale(factor: float) -> bool:
    return 16 <= factor < math.inf and math.log2(factor).is_integer()


def attach_scale(rows: Iterable[Row], scale: float | None) -> None:
    """Write the loss scale into the rows that still carry it."""
    for row in rows:
        if row.pop("scaled"):
            row["scale"] = scale


# --- steps -----------------------------------------------------------------------------------------------------------


def step_row(batch: StepBatch, rows: list[Row], rank: int, scale: float | None) -> Row:
    """The steps row."""
    facts = batch.facts
    found_inf = read(facts.found_inf)
    losses = [value for value in map(read, facts.losses) if value is not None]
    lrs = [value for value in map(read, facts.lrs) if value is not None]
    return {
        "step": facts.step,
        "rank": rank,
        "optimizer": facts.optimizer,
        "complete": facts.complete,
        "wall_time": facts.wall_time,
        "micro_steps": facts.micro_steps,
        "loss": math.fsum(losses) / (scale or 1.0) if losses and all(map(math.isfinite, losses)) else _any_bad(losses),
        "lr": max(lrs, default=None),
        "lrs": lrs,
        "grad_norm": _grad_norm(batch, rows, scale),
        "clip_norm": facts.clip_norm,
        "clipped_before_unscale": facts.clipped_before_unscale,
        "loss_scale": scale,
        "growth_tracker": None if (tracker := read(facts.growth_tracker)) is None else int(tracker),
        "found_inf": None if found_inf is None else found_inf > 0,
        "skipped": bool(found_inf) if found_inf is not None else facts.not_reached,
        "autocast_dtype": facts.autocast_dtype,
        "lost_update_fraction": _lost_updates(rows),
        "non_finite": _non_finite(rows, losses) + _bad_sentinel(batch),
        "sampled": facts.sampled,
        "recorder_ns": facts.recorder_ns,
        "device_ns": None,
        "step_ns": facts.step_ns,
    }


def _any_bad(losses: list[float]) -> float | None:
    """NaN if a loss is NaN or infinities cancel, the infinity if there is just one kind; null without a loss."""
    return sum(losses) if losses else None


def _grad_norm(batch: StepBatch, rows: list[Row], scale: float | None) -> float | None:
    """From the rows of the optimizer's own parameters; null when some are missing."""
    own = batch.facts.gradients_of
    if own is None:
        norm, amax = read(batch.facts.grad_norm), read(batch.facts.grad_amax)
        if norm is None or amax is None:
            return None
        return norm / ((scale or 1.0) if batch.facts.grad_norm_scaled else 1.0) if math.isfinite(amax) else math.nan
    gradients = [r for r in rows if r["kind"] == "weight_grad" and (r["root"], r["module"], r["name"]) in own]
    if any(map(is_bad, gradients)):
        return math.nan
    return math.sqrt(math.fsum(r["sum_sq"] for r in gradients)) / (scale or 1.0) if gradients else None


def _lost_updates(rows: list[Row]) -> float | None:
    updates = [r for r in rows if r["kind"] == "update"]
    lost = sum(r["unchanged"] for r in updates)
    intended = sum(r["numel"] - r["zero"] + r["unchanged"] for r in updates)
    return lost / intended if intended else None


def is_bad(row: Row) -> bool:
    """Whether the tensor holds a NaN or an Inf."""
    return bool(row["nan"] or row["pos_inf"] or row["neg_inf"])


def _bad_sentinel(batch: StepBatch) -> int:
    """1 if an unsampled step's gradients are not finite: which of them is not known."""
    amax = read(batch.facts.grad_amax)
    return int(amax is not None and not math.isfinite(amax))


def _non_finite(rows: list[Row], losses: list[float]) -> int:
    unmeasured_losses = 0 if any(r["kind"] == "loss" for r in rows) else sum(not math.isfinite(x) for x in losses)
    return unmeasured_losses + sum(r["kind"] in TRIGGER_KINDS and is_bad(r) for r in rows)
