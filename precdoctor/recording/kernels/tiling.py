"""The division of a tensor into tiles for the CUDA kernels. Needs no Triton."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at

#: Elements of a tile that is counted exhaustively. Larger ones spill registers on sm_90.
TILE: Final = 1024
#: Maximum number of columns of such a tile: the largest block.
WIDTH: Final = 128
#: Tile widths for shorter rows (of one, three, 16 columns). Each has its own kernel, and compiling it takes seconds.
NARROW: Final = (8, 32)
#: Maximum number of merged dimensions beside the last that rows are read along.
MAX_OUTER: Final = 3
#: Threads of a program: lanes of a tile that is counted in a window.
LANES: Final = 128


class Tiling(NamedTuple):
    """How the tiles of a tensor lie in its memory; sizes and strides in elements."""

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
    #: Elements of the tiles beyond the tensor, which are counted as zeros; then all-zero blocks of 16, 32 and 128.
    padding: int
    padding16: int
    padding32: int
    padding128: int
    #: Columns of a tile that is counted exhaustively, row by row; 0: tiles are counted in a window.
    width: int
    #: Whether memory is read from end to end, instead of row by row.
    flat: bool


def elements_per_lane(dtype: torch.dtype) -> int:
    """Elements per lane of a tile that is counted in a window: 16 bytes, for FP8 8 bytes."""
    return 4 if dtype == torch.float32 else 8


def fits(shape: torch.Size, strides: tuple[int, ...] | None, want: int) -> bool:
    """Whether :func:`tiling` supports the tensor: read from end to end, or with rows along few enough dimensions.

    Args:
        shape, strides, want: see :func:`tiling`.
    """
    return strides is None or (not want and is_dense(shape, strides)) or len(at.walk(shape, strides)[1]) <= MAX_OUTER


@functools.lru_cache(maxsize=8192)
def tiling(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, want: int) -> Tiling:
    """Return the tiling of a tensor that :func:`fits` accepts.

    Args:
        shape: not empty.
        strides: in elements; None for a contiguous tensor.
        dtype: with the shape, the seed of the fingerprint.
        want: blocks and fingerprint, as a bit mask; see ``triton_kernel.py``.
    """
    numel, blocks = shape.numel(), want & 7
    in_memory = strides is None or (not want and is_dense(shape, strides))
    if in_memory and not blocks:  # one row, so that tensors of any shape share a launch
        (columns, column_stride, _), others = (numel, 1, 1), [(1, numel, numel)]
    else:
        (columns, column_stride, _), others = at.walk(shape, strides)
    (_, stride0, _), (size1, stride1, _), (size2, stride2, _) = [(1, 0, 0)] * (MAX_OUTER - len(others)) + others
    rows = numel // columns
    seed = reference.signed64(reference.fingerprint_seed(dtype, shape)) if want & 8 else 0
    if dtype == torch.float64 or (blocks and columns < WIDTH):
        width = next((few for few in NARROW if columns <= few), WIDTH)
        groups = math.ceil(columns / width)
        tiles, padding, flat = math.ceil(rows * groups / (TILE // width)), (0, 0, 0, 0), False
    else:
        flat = in_memory and (not blocks or columns % WIDTH == 0)
        lane, width = elements_per_lane(dtype), 0
        unit = WIDTH if blocks else lane
        groups = math.ceil(columns / unit)
        covered = numel if flat else rows * groups * unit
        tiles = math.ceil(covered / (LANES * lane))
        covered = tiles * LANES * lane
        of_blocks = [covered // size - rows * math.ceil(columns / size) for size in at.BLOCK_SIZES]
        padding = (covered - numel, *(of_blocks if blocks else (0, 0, 0)))
    return Tiling(
        seed, columns, column_stride, groups, tiles, numel, size1, size2, stride0, stride1, stride2,
        *padding, width, flat,
    )  # fmt: skip


def is_dense(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether the elements fill one piece of memory without gaps or overlaps, in any order."""
    if strides is None:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_aligned(addresses: Sequence[int], on: Tiling) -> bool:
    """Whether a lane's elements are adjacent, start at multiples of 16 bytes and are never cut short.

    Always false for tiles that are counted row by row, whose kernel does not use it.
    """
    if on.width or any(address % 16 for address in addresses):
        return False
    if on.flat:
        return on.numel % 16 == 0
    strides = on.columns, on.stride0, on.stride1, on.stride2
    return on.column_stride == 1 and not any(stride % 16 for stride in strides)
