"""The tensors rows of one step as columns, straight from the slots; built on the drain thread, which shares the GIL.

The constant facts of a slot (its names) are looked up once; everything else is sliced out of the snapshot for all rows
together. A row costs a few microseconds this way, a tenth of its cost as a Python object.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from precdoctor.numerics import EXP_MIN
from precdoctor.numerics.arrays import Bools, Ints
from precdoctor.recording.kernels import Snapshot
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.output.evidence import Readings
from precdoctor.recording.output.group_columns import group_columns, sharpness_columns
from precdoctor.recording.slots.cast_operand import flush_bins
from precdoctor.recording.slots.deferred import read
from precdoctor.recording.slots.slot_table import Entry
from precdoctor.recording.slots.step_batch import StepBatch
from precdoctor.runlog import arrays

#: Kinds of gradients that still carry the loss scale.
_SCALED_KINDS: Final = ("grad_output", "weight_grad", "loss")
#: A non-finite tensor of these kinds is an incident; non-finite activations alone are only evidence (masks are legal).
TRIGGER_KINDS: Final = ("loss", "weight_grad", "weight", "update")

_TEXTS: Final = ("root", "module", "module_class", "kind", "name", "phase", "dtype")
_KIND: Final = _TEXTS.index("kind")
_PHASE: Final = _TEXTS.index("phase")
_KEY: Final = [_TEXTS.index(name) for name in ("root", "module", "kind", "name")]
_OWNER: Final = [_TEXTS.index(name) for name in ("root", "module", "name")]
_COUNTS: Final = {
    "numel": at.NUMEL,
    "nan": at.NAN,
    "pos_inf": at.POS_INF,
    "neg_inf": at.NEG_INF,
    "zero": at.HIST,
    "subnormal": at.SUBNORMAL,
    "at_max": at.AT_MAX,
    "order": at.ORDER,
}


class Sites:
    """The texts of every slot so far, numbered; one instance per log."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._encoded: list[bytes] = []
        self._codes = np.empty((0, len(_TEXTS)), np.int32)
        self._calls = np.empty(0, np.int32)

    def codes(self, entries: Sequence[Entry], slots: Ints) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return per entry the numbers of its texts, shape ``(rows, len(_TEXTS))``, and its call."""
        size = int(slots.max(initial=-1)) + 1
        if size > len(self._calls):
            more = 2 * size - len(self._calls)
            self._codes = np.concatenate([self._codes, np.full((more, len(_TEXTS)), -1, np.int32)])
            self._calls = np.concatenate([self._calls, np.zeros(more, np.int32)])
        for index in np.flatnonzero(self._codes[slots, 0] < 0).tolist():
            self._add(entries[index])
        return self._codes[slots], self._calls[slots]

    def _add(self, entry: Entry) -> None:
        site = entry.site
        place = site.place
        texts = (place.root, place.module, place.module_class, site.kind, site.name, site.phase, site.dtype)
        self._codes[entry.slot] = [self._number(text) for text in texts]
        self._calls[entry.slot] = site.call

    def _number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
            self._encoded.append(text.encode("utf-8", "backslashreplace"))
        return number

    def number(self, text: str) -> int:
        """Return the number of a text; -1 if no slot has it."""
        return self._numbers.get(text, -1)

    def text(self, number: int) -> str:
        """Return the text with a number."""
        return self._texts[number]

    def column(self, codes: npt.NDArray[np.int32]) -> Any:
        """Return an Arrow string array of the texts with these numbers."""
        return arrays.chosen(self._encoded, codes)


class _TrimmedHistograms(NamedTuple):
    """Histograms without their empty ends."""

    lowest: npt.NDArray[np.int32]  # bin of the first count
    used: Bools  # whether the row has any count
    lengths: Ints
    counts: Ints  # the counts of all rows, one after the other

    def column(self, valid: Bools | None = None) -> Any:
        """Return an Arrow list array."""
        return arrays.lists(self.lengths, arrays.numbers(self.counts), valid)


class StepTensors:
    """The rows of one step, in the order their slots were first used."""

    def __init__(self, batch: StepBatch, rank: int, sites: Sites) -> None:
        self._sites = sites
        self._step, self._rank = batch.facts.step, rank
        self.rows = 0
        if not batch.entries:  # most steps: nothing below is needed
            return
        skipped = bool(read(batch.facts.found_inf))  # a fused optimizer decides on the device whether to skip
        entries = [
            e for e in batch.entries if e.device in batch.snapshots and not (skipped and e.site.kind == "update")
        ]
        entries, self._slices = _launched(entries, batch)
        self._entries = entries
        self.rows = len(entries)
        self._head = self._ints(0, at.HIST + 1)
        self._floats = self._read(lambda snapshot, slots: snapshot.floats(slots), at.FLOAT_WIDTH, np.float64)
        self._slots = slots = np.fromiter((e.slot for e in entries), np.int64, self.rows)
        self._codes, self._calls = sites.codes(entries, slots)
        self._kinds = np.ascontiguousarray(self._codes[:, _KIND])
        self._non_finite: Bools = (self._head[:, [at.NAN, at.POS_INF, at.NEG_INF]] != 0).any(axis=1)
        self._micro_starts = batch.facts.micro_starts
        self._unscaled_passes = frozenset(batch.facts.unscaled_passes)
        self._losses_are_unscaled = 0 < len({*batch.facts.unscaled_losses}) == len(batch.facts.losses)
        self._operands = [(row, e.operand) for row, e in enumerate(entries) if e.operand is not None]
        self._sharpness = [(row, e.sharpness) for row, e in enumerate(entries) if e.sharpness is not None]

    # --- values for the steps row and the events ---------------------------------------------------------------------

    def of_kinds(self, *kinds: str) -> Bools:
        """Return a mask of the rows of these kinds."""
        found: Bools = np.zeros(self.rows, np.bool_)
        for kind in kinds if self.rows else ():
            found |= self._kinds == self._sites.number(kind)
        return found

    def bad_triggers(self) -> list[tuple[str, str, str, str]]:
        """Return root, module, kind and name of the tensors whose NaN or Inf is an incident."""
        if not self.rows:
            return []
        chosen = np.flatnonzero(self._non_finite & self.of_kinds(*TRIGGER_KINDS))
        text = self._sites.text
        return [tuple(text(n) for n in self._codes[row, _KEY]) for row in chosen]  # type: ignore[misc]

    def unscale_ratios(self) -> list[float]:
        """Per parameter: amax of the accumulated gradient over amax of the gradient given to the optimizer."""
        if not self.of_kinds("weight_grad_step").any():
            return []
        before, after = self._amax_by_owner("weight_grad"), self._amax_by_owner("weight_grad_step")
        return [before[owner] / after[owner] for owner in before if owner in after]

    def _amax_by_owner(self, kind: str) -> dict[tuple[int, ...], float]:
        amax = self._floats[:, at.AMAX]
        chosen = self.of_kinds(kind) & (amax > 0)
        return dict(zip(map(tuple, self._codes[chosen][:, _OWNER].tolist()), amax[chosen].tolist(), strict=True))

    def weight_gradients(self, own: Collection[tuple[str, str, str]]) -> tuple[list[float], bool]:
        """Sums of squares of the gradients of some parameters (root, module, name), and whether all are finite."""
        if not self.rows:
            return [], True
        number = self._sites.number
        owners = {(number(root), number(module), number(name)) for root, module, name in own}
        chosen = self.of_kinds("weight_grad")
        chosen[chosen] = [tuple(owner) in owners for owner in self._codes[chosen][:, _OWNER].tolist()]
        return self._floats[chosen, at.SUM_SQ].tolist(), not self._non_finite[chosen].any()

    def lost_updates(self) -> tuple[int, int]:
        """Number of elements whose intended update did not change the weight, and of all with an intended update."""
        if not self.rows:
            return 0, 0
        updates = self._head[self.of_kinds("update")]
        lost = int(updates[:, at.UNCHANGED].sum())
        return lost, int(updates[:, at.NUMEL].sum()) - int(updates[:, at.HIST].sum()) + lost

    # --- values for the watcher of evidence --------------------------------------------------------------------------

    def readings(self) -> Readings:
        """Return range and zeros of every row of a training pass."""
        numel, text = self._head[:, at.NUMEL], self._sites.text
        kinds, dtypes = (
            np.array([text(n) for n in self._codes[:, _TEXTS.index(name)].tolist()], np.str_)
            for name in ("kind", "dtype")
        )
        train = self._codes[:, _PHASE] == self._sites.number("train")
        amax = np.where(numel > 0, self._floats[:, at.AMAX], 0.0)
        amax = np.where(np.isfinite(amax), amax, 0.0)
        rows = (self._slots, kinds, dtypes, amax, self._head[:, at.HIST] / np.maximum(numel, 1), numel)
        return Readings(*(column[train] for column in rows))

    def label(self, slot: int) -> str:
        """Return ``root/module:kind:name`` of the tensor of a slot of this step."""
        root, module, kind, name = (self._sites.text(n) for n in self._codes[self._slots == slot][0, _KEY])
        return f"{root}/{module}:{kind}:{name}"

    # --- the columns --------------------------------------------------------------------------------------------------

    def columns(self, scale: float | None) -> dict[str, Any]:
        """Return the columns of ``runlog.schema.TENSORS`` that are not null throughout; ``scale``: the loss scale."""
        count = self.rows
        columns: dict[str, Any] = {
            "step": np.full(count, self._step, np.int64),
            "rank": np.full(count, self._rank, np.int32),
            "call": self._unique_calls(),
            "micro_step": np.fromiter((e.micro_step for e in self._entries), np.int32, count),
            "fingerprint": self._fingerprints(),
        }
        columns |= {name: self._sites.column(self._codes[:, i]) for i, name in enumerate(_TEXTS)}
        columns |= {name: self._head[:, index] for name, index in _COUNTS.items()}
        sizes = np.fromiter((len(e.shape) for e in self._entries), np.int64, count)
        extents = np.fromiter(itertools.chain.from_iterable(e.shape for e in self._entries), np.int64, int(sizes.sum()))
        columns["shape"] = arrays.lists(sizes, arrays.numbers(extents))
        columns |= self._firsts_bad() | self._extremes_and_histogram() | self._updates() | self._blocks()
        columns |= self._casts() | self._scales(scale) | sharpness_columns(self.rows, self._sharpness)
        return columns | group_columns(self._entries)

    def _scales(self, loss_scale: float | None) -> dict[str, Any]:
        """Return the column ``scale``: the loss scale of gradients, the quantiser's scale of tensors that were cast."""
        scales = np.full(self.rows, math.nan if loss_scale is None else loss_scale)
        known: Bools = np.zeros(self.rows, np.bool_)
        if loss_scale is not None:
            scales[self._of_unscaled_passes()] = 1.0
            if self._losses_are_unscaled:
                scales[self.of_kinds("loss")] = 1.0
            known = self.of_kinds(*_SCALED_KINDS) | np.fromiter((e.scaled for e in self._entries), np.bool_, self.rows)
        for row, operand in self._operands:
            value = operand.scale()
            known[row], scales[row] = value is not None, math.nan if value is None else value
        return {"scale": arrays.numbers(scales, known)} if known.any() else {}

    def _of_unscaled_passes(self) -> list[int]:
        """Return the rows that merge only tensors of backward passes that began without the loss scale."""
        unscaled = self._unscaled_passes
        return [
            row
            for row, e in enumerate(self._entries if unscaled else ())
            if unscaled.issuperset(
                range(e.micro_step if e.first_micro_step is None else e.first_micro_step, e.micro_step + 1)
            )
        ]

    def _casts(self) -> dict[str, Any]:
        """Return the format that each tensor was cast to or is stored in, and the elements that casts clip or flush."""
        names: list[str | None] = [e.format for e in self._entries]
        if not self._operands:
            return {"format": arrays.strings(names)} if any(names) else {}
        counts, known = np.zeros((2, self.rows), np.int64), np.zeros((2, self.rows), np.bool_)
        bins = self._ints(at.HIST + 1, at.HIST + 1 + at.HIST_BINS)
        for row, operand in self._operands:
            names[row] = operand.fmt.dtype
            counts[:, row] = self._head[row, at.SATURATED], bins[row, : flush_bins(operand.fmt)].sum()
            known[:, row] = not operand.hides_clipping(self._floats[row, at.AMAX]), True
        return {
            "format": arrays.strings(names),
            "saturated": arrays.numbers(counts[0], known[0]),
            "flushed": arrays.numbers(counts[1], known[1]),
        }

    def _unique_calls(self) -> npt.NDArray[np.int32]:
        """Renumber calls that share a key: those without gradients after those with, another dtype after the first."""
        keys = np.column_stack([self._codes[:, _KEY], self._calls])
        calls = self._calls
        if len({row.tobytes() for row in keys}) < len(keys):
            calls, taken = calls.copy(), set()
            for row in np.argsort(self._codes[:, _PHASE] != self._sites.number("train"), kind="stable"):
                owner = tuple(keys[row, :-1])
                while (owner, calls[row]) in taken:
                    calls[row] += 1
                taken.add((owner, calls[row]))
        return calls

    def _fingerprints(self) -> Any:
        """Return the fingerprints; null for a row without one, which has 0."""
        taken = self._head[:, at.FINGERPRINT].astype(np.uint64)
        return taken if taken.all() else arrays.numbers(taken, taken != 0)

    def _firsts_bad(self) -> dict[str, Any]:
        orders = self._head[:, at.FIRST_BAD_ORDER]
        known = orders < at.NEVER
        if not known.any():
            return {}
        micro_steps = np.zeros(self.rows, np.int32)
        for row in np.flatnonzero(known):  # find the micro-step of the launch with this order number
            starts = [marks.get(self._entries[row].device, 0) for marks in self._micro_starts]
            micro_steps[row] = np.searchsorted(starts, orders[row])
        return {
            "first_bad_order": arrays.numbers(orders, known),
            "first_bad_micro_step": arrays.numbers(micro_steps, known),
        }

    def _extremes_and_histogram(self) -> dict[str, Any]:
        hist = self._histogram(at.HIST + 1, at.HIST_BINS, EXP_MIN)
        finite: Bools = hist.used | (self._head[:, at.HIST] > 0)
        amax, amin, total, squares = (self._floats[:, i] for i in (at.AMAX, at.AMIN, at.SUM, at.SUM_SQ))
        return {
            "amax": arrays.numbers(amax, finite),
            "amin_nonzero": arrays.numbers(amin, hist.used),
            "sum": arrays.numbers(total, finite),
            "sum_sq": arrays.numbers(squares, finite),
            "exp_lo": arrays.numbers(hist.lowest, hist.used),
            "exp_hist": hist.column(),
        }

    def _updates(self) -> dict[str, Any]:
        updates = self.of_kinds("update")
        if not updates.any():
            return {}
        hist = self._histogram(at.REL, at.REL_BINS, at.REL_MIN, among=updates)
        return {
            "unchanged": arrays.numbers(self._head[:, at.UNCHANGED], updates),
            "rel_lo": arrays.numbers(hist.lowest, hist.used),
            "rel_hist": hist.column(updates),
        }

    def _blocks(self) -> dict[str, Any]:
        columns = {}
        for size in at.BLOCK_SIZES:
            first, peaks = at.block_hist(size), at.block_amax(size)
            below = self._histogram(first, at.BLOCK_BINS, 0, keep_front=True)
            if below.used.any():
                amax = self._histogram(peaks + 1, at.HIST_BINS, EXP_MIN, among=below.used)
                columns[f"block{size}_hist"] = below.column(below.used)
                columns[f"block{size}_amax_lo"] = arrays.numbers(amax.lowest, amax.used)
                columns[f"block{size}_amax_hist"] = amax.column(below.used)
        return columns

    # --- access to the snapshots -------------------------------------------------------------------------------------

    def _histogram(self, first: int, bins: int, first_bin: int, **more: Any) -> _TrimmedHistograms:
        """Return ``bins`` columns of every row as histograms; ``more`` as for :func:`_trim`."""
        used = np.flatnonzero(np.max([s.largest(first, first + bins) for s, _, _ in self._slices], axis=0, initial=0))
        start, stop = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
        start = 0 if more.get("keep_front") else start
        return _trim(self._ints(first + start, first + stop), first_bin + start, **more)

    def _ints(self, first: int, stop: int) -> Ints:
        return self._read(lambda snapshot, slots: snapshot.ints(slots, first, stop), stop - first, np.int64)

    def _read(self, part: Any, width: int, dtype: Any) -> Any:
        if len(self._slices) == 1:
            return part(self._slices[0][0], self._slices[0][1])
        out = np.empty((self.rows, width), dtype)
        for snapshot, slots, positions in self._slices:
            out[positions] = part(snapshot, slots)
        return out


def _launched(entries: Iterable[Entry], batch: StepBatch) -> tuple[list[Entry], list[tuple[Snapshot, Ints, Ints]]]:
    """Return the entries whose slot was written to, and per device their slots and their positions in that list."""
    by_device: dict[Any, list[Entry]] = {}
    for entry in entries:
        by_device.setdefault(entry.device, []).append(entry)
    launched: set[int] = set()
    for device, own in by_device.items():
        slots = np.fromiter((e.slot for e in own), np.int64, len(own))
        written = batch.snapshots[device].ints(slots, at.LAUNCHES, at.LAUNCHES + 1)[:, 0] > 0
        launched.update(slots[written].tolist())
    kept = [e for own in by_device.values() for e in own if e.slot in launched]
    if len(by_device) > 1:
        kept = [e for e in batch.entries if e.slot in launched]
    slices = []
    for device in by_device:
        mine = [i for i, e in enumerate(kept) if e.device == device]
        slots = np.array([kept[i].slot for i in mine], np.int64)
        slices.append((batch.snapshots[device], slots, np.array(mine, np.int64)))
    return kept, slices


def _trim(counts: Ints, first_bin: int, *, among: Bools | None = None, keep_front: bool = False) -> _TrimmedHistograms:
    """Cut the empty ends off every row.

    Args:
        counts: rows x bins.
        first_bin: number of the first column's bin.
        among: mask; other rows become empty.
        keep_front: cut after the last count only.
    """
    full = counts != 0
    if among is not None:
        full &= among[:, None]
    used: Bools = full.any(axis=1)
    first = np.zeros(len(full), np.int64) if keep_front else full.argmax(axis=1)
    last = full.shape[1] - 1 - full[:, ::-1].argmax(axis=1)
    bins = np.arange(full.shape[1])
    inside = (bins >= first[:, None]) & (bins <= last[:, None]) & used[:, None]
    lowest = (first + first_bin).astype(np.int32)
    return _TrimmedHistograms(lowest, used, np.where(used, last - first + 1, 0), counts[inside])
