"""The memory that kernels write to: one row per slot, in blocks, in one bank per device, and its copies on the host.

On the CPU the blocks themselves go to the drain, unless copying a few rows is cheaper. On a GPU they are parts of one
segment of memory, which each step sends to the host by one copy to pinned memory; a new bank has several segments until
its first snapshot, doubling in size as slots are added.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.cuda import current_stream, stream_object

_SLOTS_PER_BLOCK = 128
#: If a step uses at most this many slots of a block, a snapshot copies them instead of handing over the whole block.
_FEW = 32
#: Blocks kept for coming snapshots, as a multiple of those in use; on a GPU, number of pinned copies kept.
_SPARE_SETS = 2
#: 64-bit words of a slot on a GPU, its integers, then its floats; both begin at multiples of 16 bytes.
_FIRST_FLOAT = at.INT_WIDTH + at.INT_WIDTH % 2
_WORDS = _FIRST_FLOAT + at.FLOAT_WIDTH
assert _WORDS % 2 == 0


class _Block:
    """The rows of consecutive slots, with their addresses."""

    __slots__ = ("floats", "floats_address", "floats_pitch", "ints", "ints_address", "ints_pitch")

    def __init__(self, ints: Tensor, floats: Tensor) -> None:
        self.ints = ints
        self.floats = floats
        self.ints_address = ints.data_ptr()
        self.floats_address = floats.data_ptr()
        #: Bytes from one row to the next.
        self.ints_pitch, self.floats_pitch = 8 * ints.stride(0), 8 * floats.stride(0)


class Bank:
    """All slots of one device.

    Attributes:
        counter: int64 scalar, launches since the last snapshot; the order of execution on the device.
        launches: the same number, counted on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.launches = 0
        #: Tensors and addresses of a block are one object, replaced as one: a signal handler of the user may raise
        #: between any two lines.
        self._blocks: list[_Block] = []
        #: The tensors measured in this step, because another slot may measure the same memory again.
        self.recent: native_cpu.Recent = {}
        #: Fresh blocks for coming snapshots; a deque, because the drain thread appends to it.
        self._spare: collections.deque[tuple[Tensor, Tensor]] = collections.deque()
        self._spare_copies: collections.deque[Tensor] = collections.deque()
        self.counter_address = self.counter.data_ptr()
        fresh = np.zeros(_WORDS, np.int64)
        fresh[[at.ORDER, at.FIRST_BAD_ORDER]] = at.NEVER
        fresh[_FIRST_FLOAT:] = np.array([-math.inf, math.inf, 0.0, 0.0]).view(np.int64)
        self._fresh = torch.from_numpy(fresh).to(device)
        self._fresh_ints, self._fresh_floats = _split(self._fresh)
        #: On a GPU, the memory that the blocks are parts of; and the streams of this step's launches.
        self._segments: list[Tensor] = []
        self._streams: set[int] = set()
        #: After the last fill of rows on a GPU; and the streams whose launches come after it.
        self._filled: torch.cuda.Event | None = None
        self._ready: set[int] = set()
        #: Whether a CUDA graph writes to these addresses, so that they must not change.
        self._captured = False

    def admits(self, slot: int) -> bool:
        """Whether a kernel can be launched for this slot now; to be called before each launch.

        False while a CUDA graph is captured, if the slot has no memory yet: its initialisation would be captured also,
        and every replay would clear the slot.
        """
        if self.device.type != "cuda":
            return True
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
            return slot < _SLOTS_PER_BLOCK * len(self._blocks)
        stream = current_stream(self.device)
        self._streams.add(stream)
        if stream not in self._ready:
            self._follow(stream)
        return True

    def _follow(self, stream: int) -> None:
        """Make a stream wait, on the device, until the rows are filled, which may happen on another stream."""
        if self._filled is not None:
            stream_object(self.device, stream).wait_event(self._filled)
        self._ready.add(stream)

    def row(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return views of the integer and float row of one slot."""
        while slot >= _SLOTS_PER_BLOCK * len(self._blocks):
            self._grow()
        number, index = divmod(slot, _SLOTS_PER_BLOCK)
        block = self._blocks[number]
        return block.ints[index], block.floats[index]

    def _grow(self) -> None:
        """Add one block on the CPU; on a GPU double the number of slots."""
        if self.device.type == "cpu":
            self._blocks.append(_Block(*self._fresh_block()))
            return
        here = torch.cuda.current_stream(self.device)
        if here.cuda_stream not in self._ready:
            self._follow(here.cuda_stream)
        segment = self._fresh.repeat(max(_SLOTS_PER_BLOCK, _SLOTS_PER_BLOCK * len(self._blocks)), 1)
        self._filled = torch.cuda.Event()
        self._filled.record(here)
        self._ready = {here.cuda_stream}
        self._segments.append(segment)
        self._blocks += _blocks_of(segment)

    def addresses(self, slot: int) -> tuple[int, int]:
        """Return the addresses of the integer and float row of a slot, on its device."""
        number, index = divmod(slot, _SLOTS_PER_BLOCK)
        if number >= len(self._blocks):
            self.row(slot)
        block = self._blocks[number]
        return block.ints_address + index * block.ints_pitch, block.floats_address + index * block.floats_pitch

    def read(self, x: Tensor, slot: int, want: int, *, restart: bool = False) -> None:
        """Measure a tensor into a slot of the CPU's bank; ``want`` as from :func:`native_cpu.wanted`."""
        ints, floats = self.addresses(slot)
        if restart:
            native_cpu.restart(ints, floats)
        native_cpu.measure_at(x, ints, floats, self.counter_address, want, self.recent)

    def restart(self, slot: int) -> None:
        """Discard a slot's values, but keep its first bad order: the next launch replaces instead of merging."""
        if self.device.type == "cpu":
            native_cpu.restart(*self.addresses(slot))
            return
        if not self.admits(slot):
            return
        ints, floats = self.row(slot)
        ints[: at.FIRST_BAD_ORDER] = self._fresh_ints[: at.FIRST_BAD_ORDER]
        ints[at.FIRST_BAD_ORDER + 1 :] = 0
        floats.copy_(self._fresh_floats)

    def reset_row(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the rows of a slot after resetting them to their initial values."""
        ints, floats = self.row(slot)
        _reset(ints, self._fresh_ints)
        _reset(floats, self._fresh_floats)
        return ints, floats

    def snapshot(self, slots: int) -> Snapshot:
        """Return a copy of slots ``0 .. slots - 1`` that is on its way to the host, and reset the rows."""
        if self.device.type == "cuda":
            return self._snapshot_of_gpu(min(slots, _SLOTS_PER_BLOCK * len(self._blocks)))
        ints, floats, count = [], [], math.ceil(slots / _SLOTS_PER_BLOCK)
        self.recent = {}  # first: it refers to addresses of blocks that are handed over below
        for number, block in enumerate(self._blocks[:count]):  # hand the block over and put a spare one in its place
            if (used := slots - number * _SLOTS_PER_BLOCK) <= _FEW:
                ints.append(_copied_and_reset(block.ints[:used], self._fresh_ints))
                floats.append(_copied_and_reset(block.floats[:used], self._fresh_floats))
                continue
            self._blocks[number] = _Block(*self._fresh_block())
            ints.append(block.ints)
            floats.append(block.floats)
        self.counter.zero_()
        self.launches = 0
        return Snapshot(ints, floats, None, self)

    def _snapshot_of_gpu(self, rows: int) -> Snapshot:
        """Copy after all launches of this step, on any stream; later launches on those streams wait for the copy."""
        here = torch.cuda.current_stream(self.device)
        self._ready = self._streams | {here.cuda_stream}
        streams = [stream_object(self.device, s) for s in self._streams if s != here.cuda_stream]
        self._streams = set()
        for stream in streams:
            here.wait_stream(stream)
        copy, first = self._pinned_memory(rows), 0
        for segment in self._segments:
            part = segment[: max(0, rows - first)]
            copy[first : first + len(part)].copy_(part, non_blocking=True)
            part.copy_(self._fresh)
            first += len(segment)
        self.counter.zero_()
        self.launches = 0
        if len(self._segments) > 1 and not self._captured:
            for segment in self._segments:
                segment.record_stream(here)
            segment = self._fresh.repeat(first, 1)
            self._segments, self._blocks = [segment], _blocks_of(segment)
        for stream in streams:
            stream.wait_stream(here)
        self._filled = event = torch.cuda.Event(blocking=True)
        event.record(here)
        parts = [_split(part) for part in copy[:rows].split(_SLOTS_PER_BLOCK)] if rows else []
        return Snapshot([ints for ints, _ in parts], [floats for _, floats in parts], event, self, copy)

    def _pinned_memory(self, rows: int) -> Tensor:
        """Return pinned memory for at least ``rows`` rows, reused if possible: allocating would wait for the device."""
        while self._spare_copies:
            if len(spare := self._spare_copies.pop()) >= rows:
                return spare
        size = sum(map(len, self._segments))
        return torch.empty((size, _WORDS), dtype=torch.int64, device="cpu", pin_memory=True)

    def _fresh_block(self) -> tuple[Tensor, Tensor]:
        """Return integers and floats of a block in their initial state, reused if possible."""
        if self._spare:
            return self._spare.pop()
        return _rows_of(self._fresh_ints), _rows_of(self._fresh_floats)

    def take_back(self, ints: Sequence[Tensor], floats: Sequence[Tensor], copy: Tensor | None) -> None:
        """Reuse the memory of a released snapshot; may be called from the drain thread."""
        if copy is not None:
            if len(self._spare_copies) < _SPARE_SETS:
                self._spare_copies.append(copy)
            return
        for pair in zip(ints, floats, strict=True):
            if len(pair[0]) < _SLOTS_PER_BLOCK:
                continue
            if len(self._spare) >= _SPARE_SETS * len(self._blocks):
                return
            _reset(pair[0], self._fresh_ints)
            _reset(pair[1], self._fresh_floats)
            self._spare.append(pair)


class Snapshot:
    """Slot rows as they were at the end of a step; only the drain thread waits for them to arrive."""

    def __init__(
        self,
        ints: list[Tensor],
        floats: list[Tensor],
        event: torch.cuda.Event | None,
        home: Bank,
        copy: Tensor | None = None,
    ) -> None:
        self._ints, self._floats, self._event = ints, floats, event
        self._home: Bank | None = home
        #: Pinned memory that holds the rows.
        self._copy = copy
        #: Number of rows of host memory in use.
        self.rows = len(copy) if copy is not None else sum(map(len, ints))

    def release(self) -> None:
        """Give the memory back to the bank; the rows cannot be read afterwards."""
        home, copy = self._home, self._copy
        ints, floats = self._ints, self._floats
        self._home, self._copy, self._ints, self._floats = None, None, [], []
        # If the device may still write to the memory, free it (which waits for the device) instead of reusing it.
        if home is not None and (self._event is None or self._event.query()):
            home.take_back(ints, floats, copy)

    def wait(self) -> None:
        """Block until the copy has arrived."""
        if self._event is not None:
            self._event.synchronize()

    def ints(self, slots: npt.NDArray[np.int64], first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return columns ``first .. stop - 1`` of the integer rows of some slots, shape ``(slots, columns)``."""
        return _gather(self._ints, slots, first, stop)

    def largest(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the largest value of columns ``first .. stop - 1`` over all integer rows; zeros if there is no row."""
        tops = [block.numpy()[:, first:stop].max(axis=0) for block in self._ints]
        return np.max(tops, axis=0) if tops else np.zeros(stop - first, np.int64)

    def floats(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the float rows of some slots, shape ``(slots, FLOAT_WIDTH)``."""
        return _gather(self._floats, slots, 0, at.FLOAT_WIDTH)


def _gather(blocks: Sequence[Tensor], slots: npt.NDArray[np.int64], first: int, stop: int) -> npt.NDArray[Any]:
    """Return columns of some slots; zeros for slots beyond the last block, which had no launch."""
    out = np.zeros((len(slots), stop - first), np.float64 if blocks and blocks[0].is_floating_point() else np.int64)
    block, index = np.divmod(slots, _SLOTS_PER_BLOCK)
    for number in np.flatnonzero(np.bincount(block[block < len(blocks)])).tolist():
        mine = block == number
        out[mine] = blocks[number].numpy()[:, first:stop][index[mine]]
    return out


# On the CPU, NumPy creates and copies the blocks: torch would use its thread pool for their size, and in a forked child
# that pool hangs (its threads are the parent's), although nothing the child computes may be large enough to need it.


def _rows_of(fresh: Tensor) -> Tensor:
    return torch.from_numpy(np.tile(fresh.numpy(), (_SLOTS_PER_BLOCK, 1)))


def _copied_and_reset(rows: Tensor, fresh: Tensor) -> Tensor:
    copy = torch.from_numpy(rows.numpy().copy())
    _reset(rows, fresh)
    return copy


def _reset(rows: Tensor, fresh: Tensor) -> None:
    if rows.is_cpu:
        rows.numpy()[:] = fresh.numpy()
    else:
        rows.copy_(fresh)


def _split(words: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into views of their integers and their floats."""
    return words[..., : at.INT_WIDTH], words[..., _FIRST_FLOAT:].view(torch.float64)


def _blocks_of(segment: Tensor) -> list[_Block]:
    return [_Block(*_split(part)) for part in segment.split(_SLOTS_PER_BLOCK)]
