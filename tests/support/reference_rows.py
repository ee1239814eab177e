"""The tensors rows of a step made one by one, slowly and readably: what the recorder's columns are tested against."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from precdoctor.numerics import EXP_MIN
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.slots.step_batch import StepBatch

#: Gradients of these kinds still carry the loss scale.
_SCALED_KINDS = frozenset(("grad_output", "weight_grad", "loss"))


def tensor_rows(batch: StepBatch, rank: int, scale: float | None) -> list[dict[str, Any]]:
    """The tensors rows of one step, in the order their slots were first used; keys are unique."""
    rows = []
    for entry in batch.entries:
        snapshot = batch.snapshots.get(entry.device)
        if snapshot is None:
            continue
        slot = np.array([entry.slot])
        (ints,), (floats,) = snapshot.ints(slot, 0, at.INT_WIDTH), snapshot.floats(slot)
        if ints[at.LAUNCHES] == 0:
            continue
        rows.append(_row(entry, ints, floats, batch, rank))
    keys = set()
    for row in sorted(rows, key=lambda row: row["phase"] != "train"):
        while (key := (row["root"], row["module"], row["kind"], row["name"], row["call"])) in keys:
            row["call"] += 1  # a call without gradients comes after those with, one in another dtype after the first
        keys.add(key)
    for row in rows:
        if row.pop("scaled"):
            row["scale"] = scale
    return rows


def _row(entry, ints, floats, batch, rank) -> dict[str, Any]:
    site = entry.site
    first_bad = int(ints[at.FIRST_BAD_ORDER])
    lo, hist = _trim(ints[at.HIST + 1 : at.HIST + at.HIST_WIDTH], EXP_MIN)
    finite = int(hist.sum()) + int(ints[at.HIST])
    row = {
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
    if entry.operand is not None:
        fmt = entry.operand.fmt
        hidden = not entry.operand.whole and row["amax"] == fmt.max
        flushed = [n for k, n in enumerate(hist, lo or 0) if 2.0 ** (k + 1) <= fmt.flush_limit]
        row |= {"format": fmt.dtype, "flushed": int(sum(flushed)), "scale": entry.operand.scale(), "scaled": False}
        row["saturated"] = None if hidden else int(ints[at.SATURATED])
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


def _trim(counts, first_bin):
    """Bin number of the first non-empty bin, and the counts from there to the last non-empty one."""
    used = np.flatnonzero(counts)
    if used.size == 0:
        return None, counts[:0]
    return first_bin + int(used[0]), counts[used[0] : used[-1] + 1]


def _micro_step(order, device, batch) -> int:
    """The micro-step in which the launch with this order number was made."""
    starts = [marks.get(device, 0) for marks in batch.facts.micro_starts]
    return bisect.bisect_left(starts, order)
