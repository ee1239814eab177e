"""The statistics op ``precdoctor::stat(Tensor x, int slot) -> ()`` and the banks of slots it writes to.

The op owns its buffers: one bank per device, grown in blocks, so a slot is a plain integer that compiled graphs and
CUDA graphs can carry. It is made with ``torch.library.Library.define/impl`` (a Python ``custom_op`` costs ten times as
much per call) and registered for every backend; which kernel runs is decided here.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from precdoctor.recording.kernels import batched, blocked, cuda, native, reference
from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels.adam import Adam as Adam
from precdoctor.recording.kernels.apart import apart_from_user_modes as apart_from_user_modes
from precdoctor.recording.kernels.batched import Job as Job
from precdoctor.recording.kernels.batched import Tables as Tables
from precdoctor.recording.kernels.cuda import stream_of as stream_of

_SLOTS_PER_BLOCK = 128
_ALL_BLOCKS, _ACTIVATION_BLOCKS = native.wanted(at.BLOCK_SIZES), native.wanted(at.BLOCK_SIZES[1:])
#: Blocks kept for the next snapshots, as a multiple of those in use.
_SPARE_SETS = 2

_library = torch.library.Library("precdoctor", "DEF")
_library.define("stat(Tensor x, int slot) -> ()")
_library.define("update(Tensor before, Tensor after, Tensor intended, int slot) -> ()")


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

    def restart(self, slot: int) -> None:
        """Forget a slot's values but not when it was first bad: the next launch replaces instead of merging."""
        if self.device.type == "cpu":
            native.restart(*self.addresses(slot))
            return
        ints, floats = self.row(slot)
        ints[: at.FIRST_BAD_ORDER] = self._fresh_ints[: at.FIRST_BAD_ORDER]
        ints[at.FIRST_BAD_ORDER + 1 :] = 0
        floats.copy_(self._fresh_floats)

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
    for number in np.unique(block[block < len(blocks)]):
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


_banks: dict[torch.device, Bank] = {}
#: Slots that also get block-16 histograms (weights: NVFP4 cares about nothing wider).
_with_block16: set[int] = set()
#: Whether block histograms are taken at all at the moment.
_with_blocks = True


def bank(device: torch.device) -> Bank:
    """The device's bank, made at first use."""
    found = _banks.get(device)
    if found is None:
        found = _banks[device] = Bank(device)
    return found


def banks() -> dict[torch.device, Bank]:
    """Every bank in use, by device."""
    return _banks


def forget_all() -> None:
    """Drop every bank: a forked child must not touch its parent's."""
    _banks.clear()
    _with_block16.clear()


def want_block16(slot: int) -> None:
    """Histogram blocks of 16 for this slot, too."""
    _with_block16.add(slot)


def want_blocks(*, wanted: bool) -> None:
    """Histogram blocks from now on, or leave them out: they cost as much as everything else together."""
    global _with_blocks  # noqa: PLW0603 - one recorder per process
    _with_blocks = wanted


def measurable(x: Tensor) -> Tensor:
    """FP64 exists on CPUs and CUDA devices only; elsewhere the tensor is brought to the host."""
    return x if x.is_cpu or x.is_cuda else x.cpu()


def _stat(x: Tensor, slot: int) -> None:
    x = measurable(x)
    home = bank(x.device)
    home.launches += 1
    if native.supports(x):
        native.measure_at(x, *home.addresses(slot), home.counter_address, _wanted_blocks(slot), home.recent)
        return
    blocks = () if not _with_blocks else at.BLOCK_SIZES if slot in _with_block16 else at.BLOCK_SIZES[1:]
    _launch(x, home, slot, blocks)


def _wanted_blocks(slot: int) -> int:
    return 0 if not _with_blocks else _ALL_BLOCKS if slot in _with_block16 else _ACTIVATION_BLOCKS


def _launch(x: Tensor, home: Bank, slot: int, blocks: Sequence[int]) -> None:
    if x.is_cuda and cuda.measure(x, *home.row(slot), home.counter, blocks):
        return
    fast = x.is_cpu and x.dtype != torch.float64
    (blocked if fast else reference).measure(x, *home.row(slot), home.counter, blocks)


def _update(before: Tensor, after: Tensor, intended: Tensor, slot: int) -> None:
    before, after, intended = (measurable(t) for t in (before, after, intended))
    home = bank(before.device)
    home.launches += 1
    if native.supports_update(before, after, intended):
        native.update_at(before, after, intended, *home.addresses(slot), home.counter_address)
    else:
        reference.measure_update(before, after, intended, *home.row(slot), home.counter)


_library.impl("stat", _stat, "CompositeExplicitAutograd")
_library.impl("update", _update, "CompositeExplicitAutograd")


def _nothing(*_: object) -> None:
    """On fake tensors there is nothing to measure."""


for _name in ("stat", "update"):
    torch.library.register_fake(f"precdoctor::{_name}", _nothing, lib=_library)


def stat(x: Tensor, slot: int) -> None:
    """Accumulate the statistics of ``x`` into a slot of its device.

    Args:
        x: floating-point, dense, not empty; any strides.
        slot: which row of the device's bank.
    """
    # The dispatcher would cost small tensors more than the kernel; only a graph being traced needs the op itself.
    if torch.compiler.is_compiling():
        torch.ops.precdoctor.stat.default(x, slot)
    else:
        _stat(x, slot)


def update(before: Tensor, after: Tensor, intended: Tensor | Adam, slot: int) -> None:
    """Accumulate an update row; :func:`precdoctor.recording.kernels.reference.measure_update` says of what.

    Args:
        before, after: the weight.
        intended: FP32 or FP64, of its shape; or its terms where :func:`makes_updates` says so.
        slot: which row of the device's bank.
    """
    if isinstance(intended, Adam):
        home = bank(before.device)
        home.launches += 1
        native.adam_at(before, after, intended, *home.addresses(slot), home.counter_address)
        return
    if torch.compiler.is_compiling():
        torch.ops.precdoctor.update.default(before, after, intended, slot)
    else:
        _update(before, after, intended, slot)


def makes_updates(before: Tensor, after: Tensor, intended: Adam) -> bool:
    """Whether :func:`update` can make the intended update by itself, which saves a pass over memory or two."""
    return native.supports_adam(before, after, intended)


def gathers(x: Tensor, before: Tensor | None = None, intended: Tensor | None = None) -> bool:
    """Whether it is worth while, and possible, to keep a tensor, or an update to it, for :func:`together`.

    On CUDA it is, where a launch costs more than a small tensor does; the CPU kernel is as quick one by one.
    """
    return x.is_cuda and cuda.takes(x, before, intended)


def together(jobs: Sequence[batched.Job], tables: batched.Tables) -> None:
    """What :func:`stat` and :func:`update` would put into the slots one after the other, in a launch per group.

    Args:
        jobs: tensors that :func:`gathers` took, no two of one slot.
        tables: of tensors of this kind; kept for the next time.
    """
    for group, members in batched.grouped(jobs, bank, _wanted_blocks, cuda.stream_of).items():
        home = bank(group.device)
        if cuda.measure_many(group, members, tables.of(group), home.counter):
            home.launches += len(members)
            continue
        for job in (member.job for member in members):
            one_by_one(job)


def one_by_one(job: batched.Job) -> None:
    """The same for a tensor by itself."""
    if job.restart:
        bank(job.x.device).restart(job.slot)
    if job.before is None or job.intended is None:
        stat(job.x, job.slot)
    else:
        update(job.before, job.x, job.intended, job.slot)


_alone = threading.local()


def measured(x: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The slot row of one tensor by itself, without block histograms; waits for its device.

    Args:
        x: as :func:`stat` takes it.

    Returns:
        Integer and float columns (see ``layout``), to be read before the next call.
    """
    x = measurable(x)
    banks: dict[torch.device, Bank] = _alone.__dict__.setdefault("banks", {})
    home = banks.get(x.device)
    if home is None:
        home = banks[x.device] = Bank(x.device)
    ints, floats = home.row(0)
    _fill(ints, home._fresh_ints)
    _fill(floats, home._fresh_floats)
    if native.supports(x):
        native.measure_at(x, *home.addresses(0), home.counter_address, 0)
    else:
        _launch(x, home, 0, ())
    return ints.cpu().numpy(), floats.cpu().numpy()


def in_use(device: torch.device) -> str:
    """Which kernel measures tensors of a device, for people: ``C (avx2)``, ``Triton``, ``torch operations``."""
    if device.type == "cpu" and native.library() is not None:
        return f"C ({native.variant()})"
    if device.type == "cuda":
        return "Triton" if cuda.failure() is None else f"torch operations ({cuda.failure()})"
    return "torch operations"
