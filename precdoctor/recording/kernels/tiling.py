"""How the CUDA kernel lays its tiles on a tensor. Needs no Triton."""

from __future__ import annotations

import functools
import math
from typing import Final, NamedTuple

import torch

from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels import reference

#: Elements of a tile. Larger ones spill registers on sm_90.
TILE: Final = 2048
#: The most columns of one: the largest block.
WIDTH: Final = 128
#: Rows are walked along this many merged dimensions, beside the last.
MAX_OUTER: Final = 3


class Tiling(NamedTuple):
    """How the tiles of a tensor lie on it; sizes and strides in elements."""

    seed: int
    columns: int
    column_stride: int
    groups: int
    tiles: int
    numel: int
    size1: int
    size2: int
    stride0: int
    stride1: int
    stride2: int
    #: Columns of a tile; a group, of which ``TILE // width`` make a tile, is a row of them.
    width: int


@functools.lru_cache(maxsize=8192)
def tiling(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype) -> Tiling:
    """The tiles of a tensor that :func:`supports`.

    Args:
        shape: not empty.
        strides: null for a contiguous tensor.
        dtype: with the shape, what the fingerprint starts from.
    """
    (columns, column_stride, _), others = at.walk(shape, strides)
    (_, stride0, _), (size1, stride1, _), (size2, stride2, _) = [(1, 0, 0)] * (MAX_OUTER - len(others)) + others
    width = min(1 << (columns - 1).bit_length(), WIDTH)
    groups, numel = math.ceil(columns / width), shape.numel()
    tiles = math.ceil(numel // columns * groups / (TILE // width))
    seed = reference.signed64(reference.fingerprint_seed(dtype, shape))
    return Tiling(
        seed, columns, column_stride, groups, tiles, numel, size1, size2, stride0, stride1, stride2, width
    )  # fmt: skip
