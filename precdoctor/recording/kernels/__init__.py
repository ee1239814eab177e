"""Adds statistics of tensors to slots, and chooses the kernel that computes them.

A slot is a number; its memory is in the bank of the tensor's device, at addresses that CUDA graphs can carry.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from precdoctor.recording.kernels import batched, blocked, cuda, native_cpu, reference
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.adam_update import Adam as Adam
from precdoctor.recording.kernels.batched import Job as Job
from precdoctor.recording.kernels.batched import Tables as Tables
from precdoctor.recording.kernels.cuda import stay_out_of_captures as stay_out_of_captures
from precdoctor.recording.kernels.cuda import stream_of as stream_of
from precdoctor.recording.kernels.native_cpu import supports_update as supports_update
from precdoctor.recording.kernels.outside_user_modes import apart_from_every_mode as apart_from_every_mode
from precdoctor.recording.kernels.outside_user_modes import apart_from_user_modes as apart_from_user_modes
from precdoctor.recording.kernels.outside_user_modes import is_unwatched, modes_open
from precdoctor.recording.kernels.slot_memory import Bank as Bank
from precdoctor.recording.kernels.slot_memory import Snapshot as Snapshot

_ALL_BLOCKS, _ACTIVATION_BLOCKS = native_cpu.wanted(at.BLOCK_SIZES), native_cpu.wanted(at.BLOCK_SIZES[1:])

_banks: dict[torch.device, Bank] = {}
#: Slots that also get histograms of blocks of 16, for NVFP4; ``slot_table`` chooses them by kind.
_with_block16: set[int] = set()
#: Slots that get a fingerprint on CUDA, where it costs as much as a third of everything else.
_with_fingerprint: set[int] = set()
_FINGERPRINT = 8  # bit of a ``want`` mask; the lower bits are the block sizes
_with_blocks = True


def bank(device: torch.device) -> Bank:
    """Return the device's bank; create it at first use."""
    found = _banks.get(device)
    if found is None:
        found = _banks[device] = Bank(device)
    return found


def admitted(device: torch.device, slot: int) -> Bank | None:
    """Return the bank to launch into; None if this slot cannot be written now: see :meth:`Bank.admits`.

    No bank is created while a CUDA graph is captured: its replays would reset it, and filling it waits for the device.
    """
    home = _banks.get(device)
    if home is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        home = bank(device)
    return home if home.admits(slot) else None


def restart(device: torch.device, slot: int) -> None:
    """Discard the values of a slot, but keep its first bad order, as :meth:`Bank.restart`."""
    if (home := admitted(device, slot)) is not None:
        home.restart(slot)


def banks() -> dict[torch.device, Bank]:
    """Return every bank in use, by device."""
    return _banks


def forget_all() -> None:
    """Drop every bank: a forked child must not touch those of its parent."""
    _banks.clear()
    _with_block16.clear()
    _with_fingerprint.clear()


def want_fingerprint(slot: int) -> None:
    """Record a fingerprint of the tensors of this slot. On the CPU, where it is cheap, every slot has one."""
    _with_fingerprint.add(slot)


def want_block16(slot: int) -> None:
    """Record histograms of blocks of 16 for this slot also."""
    _with_block16.add(slot)


def want_blocks(*, wanted: bool) -> None:
    """Switch block histograms on or off from now on: they cost as much as all other statistics together."""
    global _with_blocks  # noqa: PLW0603 - one recorder per process
    _with_blocks = wanted


def measurable(x: Tensor) -> Tensor:
    """Return ``x``, or a copy on the host if its device lacks FP64 (any but CPU and CUDA)."""
    return x if x.is_cpu or x.is_cuda else x.cpu()


def stat(x: Tensor, slot: int) -> None:
    """Accumulate the statistics of ``x`` (floating-point, dense, not empty; any strides) into a slot of its device."""
    x = measurable(x)
    home = admitted(x.device, slot)
    if home is None:
        return
    home.launches += 1
    if native_cpu.supports(x):
        home.read(x, slot, _wanted_blocks(slot))
        return
    _launch(x, home, slot, _wanted(slot))


def _wanted_blocks(slot: int) -> int:
    return 0 if not _with_blocks else _ALL_BLOCKS if slot in _with_block16 else _ACTIVATION_BLOCKS


def _wanted(slot: int) -> int:
    return _wanted_blocks(slot) | (_FINGERPRINT if slot in _with_fingerprint else 0)


def _launch(x: Tensor, home: Bank, slot: int, want: int) -> None:
    """Run the first kernel that supports the tensor: Triton, torch on the CPU, the reference."""
    if x.is_cuda and cuda.measure(x, *home.addresses(slot), home.counter_address, want):
        return
    blocks = [size for i, size in enumerate(at.BLOCK_SIZES) if want >> i & 1]
    fast = x.is_cpu and x.dtype != torch.float64
    (blocked if fast else reference).measure(x, *home.row(slot), home.counter, blocks)


def reads_memory(x: Tensor) -> bool:
    """Whether :func:`stat` of ``x`` would run no torch op that a mode could notice; ``x`` must be a plain tensor."""
    # Ask C functions first whether any mode is open, because the answer is almost always no and every row asks.
    alone = not (modes_open() or torch._C._len_torch_function_stack() or torch.is_inference_mode_enabled())
    return (alone or is_unwatched()) and native_cpu.supports(x)


def read(x: Tensor, slot: int, *, restart: bool = False) -> None:
    """:func:`stat` with less overhead, for a tensor that :func:`reads_memory` accepts.

    ``restart``: discard the values of the slot first.
    """
    home = bank(x.device)
    home.launches += 1
    home.read(x, slot, _wanted_blocks(slot), restart=restart)


def update(before: Tensor, after: Tensor, intended: Tensor | Adam, slot: int) -> None:
    """Accumulate an update row; see :func:`precdoctor.recording.kernels.reference.measure_update` for its contents.

    Args:
        before, after: the weight.
        intended: of the weight's shape; or its terms if :func:`supports_update` accepts them.
    """
    if isinstance(intended, Tensor):
        before, after, intended = measurable(before), measurable(after), measurable(intended)
    home = admitted(before.device, slot)
    if home is None:
        return
    home.launches += 1
    if isinstance(intended, Adam) or supports_update(before, after, intended):
        native_cpu.update_at(before, after, intended, *home.addresses(slot), home.counter_address)
    else:
        reference.measure_update(before, after, intended, *home.row(slot), home.counter)


def gathers(x: Tensor, before: Tensor | None = None, intended: Tensor | None = None) -> bool:
    """Whether to collect a tensor, or an update of it, for one :func:`together` instead of launching at once.

    True on CUDA, where a launch costs more than measuring a small tensor; the CPU kernel is as fast one by one.
    """
    return x.is_cuda and cuda.takes(x, before, intended)


def together(jobs: Sequence[batched.Job], tables: batched.Tables) -> None:
    """Do what :func:`stat` and :func:`update` would do for one job after another, with one launch per group.

    Args:
        jobs: tensors that :func:`gathers` accepted, no two of the same slot.
        tables: device tables of tensors of this kind, reused in the next step.
    """

    def addresses(device: torch.device, slot: int) -> tuple[int, int]:
        return bank(device).addresses(slot)

    for group, members in batched.grouped(jobs, addresses, _wanted, cuda.stream_of).items():
        home = bank(group.device)
        home.admits(members[0].job.slot)
        if cuda.measure_many(group, members, tables.of(group), home.counter):
            home.launches += len(members)
            continue
        for job in (member.job for member in members):
            one_by_one(job)


def one_by_one(job: batched.Job) -> None:
    """Measure one job of :func:`together` in a launch of its own."""
    if job.restart:
        restart(job.x.device, job.slot)
    if job.before is None or job.intended is None:
        stat(job.x, job.slot)
    else:
        update(job.before, job.x, job.intended, job.slot)


_own = threading.local()


def measured(x: Tensor, *, fingerprint: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Measure one tensor outside of the run's slots, without block histograms; waits for its device.

    Args:
        x: as for :func:`stat`.
        fingerprint: compute it on CUDA also.

    Returns:
        Integer and float row (see ``row_layout``). The next call on this thread overwrites those of a CPU tensor.
    """
    x = measurable(x)
    banks: dict[torch.device, Bank] = _own.__dict__.setdefault("banks", {})
    home = banks.get(x.device)
    if home is None:
        home = banks[x.device] = Bank(x.device)
    ints, floats = home.reset_row(0)
    if native_cpu.supports(x):
        native_cpu.measure_at(x, *home.addresses(0), home.counter_address, 0)
    else:
        _launch(x, home, 0, _FINGERPRINT if fingerprint else 0)
    return ints.cpu().numpy(), floats.cpu().numpy()
