"""Amax and sum of squares of GPU tensors that come every step and change only their addresses. Needs no Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from precdoctor.recording.kernels import cuda
from precdoctor.recording.kernels.batched import assigned_programs, send
from precdoctor.recording.kernels.tiling import LANES, elements_per_lane, is_dense

_Addresses = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class _Alike:
    """Tensors of one dtype: their indices in the list, and the device table of their addresses."""

    def __init__(self, dtype: torch.dtype, places: list[int], sizes: list[int], device: torch.device) -> None:
        self.dtype, self.places = dtype, places
        tiles = [math.ceil(size / (LANES * elements_per_lane(dtype))) for size in sizes]
        self.chunk, firsts, owners = assigned_programs(tiles)
        self.programs = len(owners)
        self.host = np.column_stack((np.zeros(len(sizes), np.int64), sizes, firsts)).astype(np.int64)
        self.owners = send(owners, None, device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows: Tensor | None = None

    def describe(self, addresses: _Addresses, device: torch.device) -> None:
        """Write these addresses to the table, unless it already has them."""
        if self.rows is None or not np.array_equal(addresses, self.host[:, 0]):
            self.host[:, 0] = addresses
            self.rows = send(self.host, self.rows, device)


class DeviceLook:
    """Amax and sum of squares of a list of tensors: one launch per dtype, without waiting for the device.

    Args:
        tensors: plain and strided, on one GPU; :meth:`fits` must accept them.
    """

    _MOST_DTYPES: Final = 4

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        self._stream = cuda.stream_of(tensors[0])
        places: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(tensors):
            places.setdefault(x.dtype, []).append(i)
        self._kinds = [
            _Alike(dtype, found, [tensors[i].numel() for i in found], self._device) for dtype, found in places.items()
        ]

    @classmethod
    def fits(cls, tensors: Sequence[Tensor]) -> bool:
        """Whether the kernel can read these: dense, not empty, of few formats of at most 32 bits, on one GPU."""
        device = tensors[0].device
        return (
            all(x.device == device and x.layout is torch.strided and x.numel() for x in tensors)
            and cuda.looks_at({x.dtype for x in tensors}, device)
            and len({x.dtype for x in tensors}) <= cls._MOST_DTYPES
            and all(x.is_contiguous() or is_dense(x.shape, x.stride()) for x in tensors)
        )

    def look(self, addresses: list[int], stream: int) -> Tensor | None:
        """Launch the kernel on ``stream``, the current one, for tensors at these addresses.

        Returns:
            FP64, shape ``(dtypes, 2)``, on the device: amax as in :func:`native_cpu.look`, and sum of squares. None
            if the kernel could not be launched, or if the current stream has changed.
        """
        if stream != self._stream:
            return None
        device, kinds, lying = self._device, self._kinds, np.array(addresses, np.int64)
        programs = sum(kind.programs for kind in kinds)
        memory = torch.empty(2 * (len(kinds) + programs), dtype=torch.float64, device=device)
        out = memory.data_ptr()
        partial = out + 16 * len(kinds)
        for kind in kinds:
            mine = lying if len(kinds) == 1 else lying[kind.places]
            kind.describe(mine, device)
            assert kind.rows is not None, "the table was written"
            at = kind.rows.data_ptr(), kind.owners.data_ptr(), partial, out, kind.done.data_ptr()
            if not cuda.look(
                device, kind.programs, at, kind.chunk, kind.dtype, aligned=not np.bitwise_or.reduce(mine) & 15
            ):
                return None
            out, partial = out + 16, partial + 16 * kind.programs
        return memory[: 2 * len(kinds)].view(-1, 2)
