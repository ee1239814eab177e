"""Many tensors in one launch: which tensors can share one, and the device table through which a kernel finds them.

Nothing here needs Triton; the launch itself is in ``triton_batch.py``. A table is reused as long as the same tensors
come again. When their addresses change (gradients, after ``zero_grad``), it is written again, stream-ordered after
earlier launches, from pinned memory that the host allocator reuses only after the copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from precdoctor.recording.kernels.tiling import Tiling, is_aligned, tiling

#: A row of the table: up to three addresses, those of the slot's integers and floats, its first program; the tiling.
TILING: Final = 6
#: Fields of a row: all of the tiling's but ``width`` and ``flat``, which are equal for all tensors of a launch.
FIELDS: Final = TILING + len(Tiling._fields) - 2
#: Minimum of ``Table.chunk``, and about the maximum number of programs of a launch.
FEWEST_TILES: Final = 8
MOST_PROGRAMS: Final = 2048
#: Maximum tables kept: tensors of one kind need one per dtype, tile width, alignment and stream.
_MOST_TABLES: Final = 64


class Job(NamedTuple):
    """One tensor to be measured; for an update ``x`` is the weight after the step."""

    x: Tensor
    slot: int
    restart: bool = False
    before: Tensor | None = None
    intended: Tensor | None = None
    #: The stream on which ``x`` was computed, as ``cuda.stream_of`` returns it.
    stream: int = 0


class Group(NamedTuple):
    """The properties that all tensors of one launch share."""

    device: torch.device
    stream: int
    dtype: torch.dtype
    #: Blocks and fingerprint, as a bit mask.
    want: int
    #: See :class:`tiling.Tiling`, and :func:`tiling.is_aligned`.
    width: int
    flat: bool
    aligned: bool
    restart: bool
    #: The dtype of intended updates; None for statistics of tensors.
    intended: torch.dtype | None


class Member(NamedTuple):
    """A tensor of a group, as its row of the table describes it."""

    job: Job
    addresses: tuple[int, ...]
    tiling: Tiling


def grouped(
    jobs: Iterable[Job],
    addresses: Callable[[torch.device, int], tuple[int, int]],
    want: Callable[[int], int],
    stream: Callable[[Tensor], int],
) -> dict[Group, list[Member]]:
    """Sort jobs into groups that can share a launch, in their original order.

    Args:
        jobs: any, as long as no slot occurs twice.
        addresses: returns the addresses of a slot's integer and float row.
        want: returns blocks and fingerprint of a slot, as a bit mask.
        stream: returns the current stream of a tensor's device.
    """
    groups: dict[Group, list[Member]] = {}
    streams: dict[torch.device, int] = {}
    for job in jobs:
        x, before, intended = job.x, job.before, job.intended
        if before is None or intended is None:
            tensors, blocks, kind = [x], want(job.slot), None
            on = tiling(x.shape, None if x.is_contiguous() else x.stride(), x.dtype, blocks)
        else:  # all three have the same layout in memory
            tensors, blocks, kind = [before, x, intended], 0, intended.dtype
            on = tiling(x.shape, None, torch.float32, 0)
        if x.device not in streams:
            streams[x.device] = stream(x)
        pointers = [t.data_ptr() for t in tensors]
        wide = is_aligned(pointers, on)
        group = Group(x.device, streams[x.device], x.dtype, blocks, on.width, on.flat, wide, job.restart, kind)
        pointers += [0] * (3 - len(tensors))
        member = Member(job, (*pointers, *addresses(x.device, job.slot)), on)
        groups.setdefault(group, []).append(member)
    return groups


class Table:
    """The rows of one group on the device.

    Attributes:
        rows: int64, shape ``(tensors, FIELDS)``.
        owners: int32, shape ``(programs,)``: row of the tensor that each program reads.
        done: int64, shape ``(1,)``: number of programs that have finished; 0 between launches.
        chunk: tiles per program.
        writes: number of times ``rows`` was written.
    """

    rows: Tensor
    owners: Tensor

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.count = self.programs = self.chunk = self.writes = 0
        self._tilings: list[Tiling] = []
        self._addresses: list[tuple[int, ...]] = []
        self._host = np.empty((0, FIELDS), np.int64)

    def describe(self, members: Sequence[Member]) -> None:
        """Make the table describe these tensors; does nothing if it already does."""
        tilings = [member.tiling for member in members]
        addresses = [member.addresses for member in members]
        if tilings != self._tilings:
            self._tilings, self._addresses = [], []  # if interrupted below, the next call writes everything again
            self._lay_out(tilings)
        if addresses != self._addresses:
            self._host[:, : TILING - 1] = addresses
            self.rows = send(self._host, self.rows if self._addresses else None, self._device)
            self.writes += 1
        self._tilings, self._addresses = tilings, addresses

    def _lay_out(self, tilings: Sequence[Tiling]) -> None:
        """Assign programs to tensors, and write the fields that do not depend on addresses."""
        self.chunk, firsts, owners = assigned_programs([on.tiles for on in tilings])
        self.count, self.programs = len(tilings), len(owners)
        self._host = np.empty((self.count, FIELDS), np.int64)
        self._host[:, TILING - 1] = firsts
        self._host[:, TILING:] = [on[: FIELDS - TILING] for on in tilings]
        self.owners = send(owners, None, self._device)


def assigned_programs(tiles: Sequence[int]) -> tuple[int, list[int], np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """Divide tiles among programs: return tiles per program, each tensor's first program, and each program's tensor."""
    chunk = max(FEWEST_TILES, math.ceil(sum(tiles) / MOST_PROGRAMS))
    programs = [math.ceil(n / chunk) for n in tiles]
    firsts = list(itertools.accumulate(programs, initial=0))[:-1]
    return chunk, firsts, np.repeat(np.arange(len(tiles), dtype=np.int32), programs)


def send(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], to: Tensor | None, device: torch.device) -> Tensor:
    """Return ``values`` on the device, copied into ``to`` if given; does not wait for the copy."""
    plain = torch.from_numpy(values)
    host = torch.empty(plain.shape, dtype=plain.dtype, device="cpu", pin_memory=device.type == "cuda")
    host.numpy()[...] = values
    there = torch.empty(plain.shape, dtype=plain.dtype, device=device) if to is None else to
    return there.copy_(host, non_blocking=True)


class Tables:
    """The tables of one kind of tensors (all weights, all gradients given to an optimizer), by group."""

    def __init__(self) -> None:
        self._tables: dict[Group, Table] = {}

    def of(self, group: Group) -> Table:
        """Return the group's table; create it at first use."""
        found = self._tables.get(group)
        if found is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            found = self._tables[group] = Table(group.device)
        return found
