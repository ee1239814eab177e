"""The memory that kernels write to: a row per slot, in blocks, in a bank per device, and its copies on the host."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels import native

_SLOTS_PER_BLOCK = 128
#: Blocks kept for the next snapshots, as a multiple of those in use.
_SPARE_SETS = 2


class _Block:
    """The rows of some slots, and where they begin in memory."""

    __slots__ = ("floats", "floats_address", "ints", "ints_address")

    def __init__(self, ints: Tensor, floats: Tensor) -> None:
        self.ints = ints
        self.floats = floats
        self.ints_address = ints.data_ptr()
        self.floats_address = floats.data_ptr()


class Bank:
    """All slots of one device.

    Attributes:
        device: where the rows lie.
        counter: int64 scalar, launches since the last snapshot; the order of execution on the device.
        launches: the same number as the host counts it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.launches = 0
        #: Rows and their addresses change hands as one: a signal handler of the user's may raise between any two lines.
        self._blocks: list[_Block] = []
        #: What the slots hold of the tensors of this step, for those that are seen again under another name.
        self.recent: native.Recent = {}
        #: Fresh blocks, for the next snapshots; a deque, because the drain thread puts them there.
        self._spare: collections.deque[tuple[Tensor, Tensor]] = collections.deque()
        self.counter_address = self.counter.data_ptr()
        self._fresh_ints = torch.zeros(at.INT_WIDTH, dtype=torch.int64)
        self._fresh_ints[[at.ORDER, at.FIRST_BAD_ORDER]] = at.NEVER
        self._fresh_floats = torch.tensor([-math.inf, math.inf, 0.0, 0.0], dtype=torch.float64)
        self._fresh_ints = self._fresh_ints.to(device)
        self._fresh_floats = self._fresh_floats.to(device)

    def row(self, slot: int) -> tuple[Tensor, Tensor]:
        """The integer and float row of one slot, as views."""
        while slot >= _SLOTS_PER_BLOCK * len(self._blocks):
            self._blocks.append(_Block(_rows_of(self._fresh_ints), _rows_of(self._fresh_floats)))
        number, index = divmod(slot, _SLOTS_PER_BLOCK)
        block = self._blocks[number]
        return block.ints[index], block.floats[index]

    def addresses(self, slot: int) -> tuple[int, int]:
        """Where the integer and float row of a slot begin in memory, its device's."""
        number, index = divmod(slot, _SLOTS_PER_BLOCK)
        if number >= len(self._blocks):
            self.row(slot)
        block = self._blocks[number]
        return block.ints_address + index * at.INT_WIDTH * 8, block.floats_address + index * at.FLOAT_WIDTH * 8

    def read(self, x: Tensor, slot: int, want: int, *, restart: bool = False) -> None:
        """Measure a tensor into a slot of this bank, the CPU's; ``want`` as :func:`native.wanted` gives it."""
        ints, floats = self.addresses(slot)
        if restart:
            native.restart(ints, floats)
        native.measure_at(x, ints, floats, self.counter_address, want, self.recent)

    def restart(self, slot: int) -> None:
        """Forget a slot's values but not when it was first bad: the next launch replaces instead of merging."""
        if self.device.type == "cpu":
            native.restart(*self.addresses(slot))
            return
        ints, floats = self.row(slot)
        ints[: at.FIRST_BAD_ORDER] = self._fresh_ints[: at.FIRST_BAD_ORDER]
        ints[at.FIRST_BAD_ORDER + 1 :] = 0
        floats.copy_(self._fresh_floats)

    def cleared(self, slot: int) -> tuple[Tensor, Tensor]:
        """The rows of a slot, as if nothing had been launched into it."""
        ints, floats = self.row(slot)
        _fill(ints, self._fresh_ints)
        _fill(floats, self._fresh_floats)
        return ints, floats

    def snapshot(self, slots: int) -> Snapshot:
        """A copy of slots ``0 .. slots - 1`` on its way to the host; the rows start afresh behind it."""
        ints, floats, count = [], [], math.ceil(slots / _SLOTS_PER_BLOCK)
        self.recent = {}  # first: it has the addresses of blocks that go
        for number, block in enumerate(self._blocks[:count]):
            if self.device.type == "cpu":  # the block itself goes, and a spare one takes its place
                self._blocks[number] = _Block(*self._fresh_block())
                ints.append(block.ints)
                floats.append(block.floats)
                continue
            ints.append(_to_host(block.ints))
            floats.append(_to_host(block.floats))
            _fill(block.ints, self._fresh_ints)
            _fill(block.floats, self._fresh_floats)
        self.counter.zero_()
        self.launches = 0
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        return Snapshot(ints, floats, event, self)

    def _fresh_block(self) -> tuple[Tensor, Tensor]:
        if self._spare:
            return self._spare.pop()
        return _rows_of(self._fresh_ints), _rows_of(self._fresh_floats)

    def take_back(self, ints: Sequence[Tensor], floats: Sequence[Tensor]) -> None:
        """Blocks of a snapshot that nobody reads any more; may be called from the drain thread."""
        for pair in zip(ints, floats, strict=True):
            if self.device.type != "cpu" or len(self._spare) >= _SPARE_SETS * len(self._blocks):
                return
            _fill(pair[0], self._fresh_ints)
            _fill(pair[1], self._fresh_floats)
            self._spare.append(pair)


class Snapshot:
    """Slot rows as they were at the end of a step; only the drain thread waits for them to arrive."""

    def __init__(
        self, ints: list[Tensor], floats: list[Tensor], event: torch.cuda.Event | None, home: Bank | None = None
    ) -> None:
        self._ints = ints
        self._floats = floats
        self._event = event
        self._home = home

    def release(self) -> None:
        """Give the memory back to the bank; nothing can be read afterwards."""
        if self._home is not None:
            self._home.take_back(self._ints, self._floats)
        self._ints, self._floats = [], []

    def wait(self) -> None:
        """Block until the copy has arrived."""
        if self._event is not None:
            self._event.synchronize()

    def row(self, slot: int) -> tuple[Tensor, Tensor]:
        """The integer and float row of one slot, on the host."""
        block, index = divmod(slot, _SLOTS_PER_BLOCK)
        return self._ints[block][index], self._floats[block][index]

    def ints(self, slots: npt.NDArray[np.int64], first: int, stop: int) -> npt.NDArray[np.int64]:
        """Columns ``first .. stop - 1`` of the integer rows of some slots (slots x columns)."""
        return _gather(self._ints, slots, first, stop)

    def largest(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The largest value of columns ``first .. stop - 1`` over all integer rows; zeros when there is no row."""
        tops = [block.numpy()[:, first:stop].max(axis=0) for block in self._ints]
        return np.max(tops, axis=0) if tops else np.zeros(stop - first, np.int64)

    def floats(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The float rows of some slots (slots x ``FLOAT_WIDTH``)."""
        return _gather(self._floats, slots, 0, at.FLOAT_WIDTH)


def _gather(blocks: Sequence[Tensor], slots: npt.NDArray[np.int64], first: int, stop: int) -> npt.NDArray[Any]:
    """Zeros for slots that were never launched into and lie beyond the last block."""
    out = np.zeros((len(slots), stop - first), np.float64 if blocks and blocks[0].is_floating_point() else np.int64)
    block, index = np.divmod(slots, _SLOTS_PER_BLOCK)
    for number in np.flatnonzero(np.bincount(block[block < len(blocks)])).tolist():
        mine = block == number
        out[mine] = blocks[number].numpy()[:, first:stop][index[mine]]
    return out


# On the CPU blocks are made and copied by NumPy: torch would use its thread pool for their size, and in a forked child
# that pool hangs (its threads are the parent's), although nothing the child computes may be large enough to need it.


def _rows_of(fresh: Tensor) -> Tensor:
    """A block of fresh rows."""
    if fresh.is_cpu:
        return torch.from_numpy(np.tile(fresh.numpy(), (_SLOTS_PER_BLOCK, 1)))
    return fresh.repeat(_SLOTS_PER_BLOCK, 1)


def _fill(rows: Tensor, fresh: Tensor) -> None:
    if rows.is_cpu:
        rows.numpy()[:] = fresh.numpy()
    else:
        rows.copy_(fresh)


def _to_host(rows: Tensor) -> Tensor:
    if rows.is_cpu:
        return torch.from_numpy(rows.numpy().copy())
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return host.copy_(rows, non_blocking=True)
