"""From slot rows to log columns, on the drain thread: trimming histograms, unscaling, inferring, counting."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
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
    rows, keys = [], set()
    for entry in batch.entries:
        snapshot = batch.snapshots.get(entry.device)
        if snapshot is None:
            continue
        ints, floats = (t.numpy() for t in snapshot.row(entry.slot))
        if ints[at.LAUNCHES] == 0:
            continue
        row = _row(entry, ints, floats, batch, rank)
        while (key := (row["root"], row["module"], row["kind"], row["name"], row["call"])) in keys:
            row["call"] += 1  # the same call in another mode or dtype
        keys.add(key)
        rows.append(row)
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


def loss_scale(batch: StepBatch, rows: Iterable[Row]) -> tuple[float | None, bool]:
    """The multiplier the backward pass ran with, and whether it was inferred instead of read from a GradScaler."""
    known = read(batch.facts.loss_scale)
    if known is not None:
        return known, False
    inferred = infer_loss_scale(
        batch.facts.root_factors, unscale_ratios(rows), clipped=batch.facts.clip_norm is not None
    )
    return inferred, inferred is not None


def unscale_ratios(rows: Iterable[Row]) -> list[float]:
    """Per parameter: amax of the accumulated gradient over amax of what the optimizer was given."""
    before, after = {}, {}
    for row in rows:
        if row["kind"] in ("weight_grad", "weight_grad_step") and row["amax"]:
            (before if row["kind"] == "weight_grad" else after)[row["root"], row["module"], row["name"]] = row["amax"]
    return [before[key] / after[key] for key in before.keys() & after.keys()]


def infer_loss_scale(root_factors: list[float], ratios: list[float], *, clipped: bool) -> float | None:
    """A hand-written constant loss scale, or null.

    Evidence is a constant factor at the root of the backward pass (``loss * 65536``) and gradients divided by it before
    the step. Clipping divides further by one more factor, so with it the factor at the root is needed and the ratio
    only has to reach it. Without a usable ratio (FP32 master copies are other tensors) a root factor counts from 16 up
    and only as a power of two: losses are weighted by other numbers.

    Args:
        root_factors: factors seen at the roots of this step's backward passes.
        ratios: see :func:`unscale_ratios`; empty when no parameter had both gradients.
        clipped: whether the gradients were clipped in this step.
    """
    factor = root_factors[0] if root_factors and len(set(root_factors)) == 1 else None
    if not ratios:
        return factor if factor is not None and factor >= 16 and math.log2(factor).is_integer() else None
    middle = float(np.median(ratios))
    spread = max(abs(r / middle - 1.0) for r in ratios)
    if factor is not None and factor > 1:
        reached = middle >= factor * 0.99 if clipped else abs(middle / factor - 1.0) < 0.01
        return factor if reached and spread < 0.02 else None
    power_of_two = middle >= 16 and abs(math.log2(middle) - round(math.log2(middle))) < 1e-4
    return (
        2.0 ** round(math.log2(middle)) if power_of_two and spread < 1e-3 and not clipped and len(ratios) > 1 else None
    )


def attach_scale(rows: Iterable[Row], scale: float | None) -> None:
    """Write the loss scale into the rows that still carry it."""
    for row in rows:
        if row["kind"] in _SCALED_KINDS:
            row["scale"] = scale


# --- steps -----------------------------------------------------------------------------------------------------------


def step_row(batch: StepBatch, rows: list[Row], rank: int, scale: float | None) -> Row:
    """The steps row."""
    facts = batch.facts
    found_inf = read(facts.found_inf)
    losses = [value for value in map(read, facts.losses) if value is not None]
    return {
        "step": facts.step,
        "rank": rank,
        "optimizer": facts.optimizer,
        "complete": facts.complete,
        "wall_time": facts.wall_time,
        "micro_steps": facts.micro_steps,
        "loss": math.fsum(losses) / (scale or 1.0) if losses and all(map(math.isfinite, losses)) else _any_bad(losses),
        "lr": max(facts.lrs, default=None),
        "lrs": facts.lrs,
        "grad_norm": _grad_norm(batch, rows, scale),
        "clip_norm": facts.clip_norm,
        "clipped_before_unscale": facts.clipped_before_unscale,
        "loss_scale": scale,
        "growth_tracker": None if (tracker := read(facts.growth_tracker)) is None else int(tracker),
        "found_inf": None if found_inf is None else found_inf > 0,
        "skipped": bool(found_inf) if found_inf is not None else facts.not_reached,
        "autocast_dtype": facts.autocast_dtype,
        "lost_update_fraction": _lost_updates(rows),
        "non_finite": _non_finite(rows, losses),
        "sampled": facts.sampled,
        "recorder_ns": facts.recorder_ns,
        "device_ns": None,
        "step_ns": facts.step_ns,
    }


def _any_bad(losses: list[float]) -> float | None:
    """NaN if a loss is NaN or infinities cancel, the infinity if there is just one kind; null without a loss."""
    return sum(losses) if losses else None


def _grad_norm(batch: StepBatch, rows: list[Row], scale: float | None) -> float | None:
    squares = [r["sum_sq"] for r in rows if r["kind"] == "weight_grad" and r["sum_sq"] is not None]
    if squares:
        bad = any(is_bad(r) for r in rows if r["kind"] == "weight_grad")
        return math.nan if bad else math.sqrt(math.fsum(squares)) / (scale or 1.0)
    norm = read(batch.facts.grad_norm)
    return None if norm is None else norm / (scale or 1.0)


def _lost_updates(rows: list[Row]) -> float | None:
    updates = [r for r in rows if r["kind"] == "update"]
    lost = sum(r["unchanged"] for r in updates)
    intended = sum(r["numel"] - r["zero"] + r["unchanged"] for r in updates)
    return lost / intended if intended else None


def is_bad(row: Row) -> bool:
    """Whether the tensor holds a NaN or an Inf."""
    return bool(row["nan"] or row["pos_inf"] or row["neg_inf"])


def _non_finite(rows: list[Row], losses: list[float]) -> int:
    unmeasured_losses = 0 if any(r["kind"] == "loss" for r in rows) else sum(not math.isfinite(x) for x in losses)
    return unmeasured_losses + sum(r["kind"] in TRIGGER_KINDS and is_bad(r) for r in rows)
