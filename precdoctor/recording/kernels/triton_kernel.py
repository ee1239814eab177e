"""The CUDA kernel: every statistic in one pass and one launch, on the current stream, without allocating or waiting.

Tiles of ordinary values are counted by ``triton_window.py``, the others by ``triton_tile.py``. The last program to
finish advances the launch counter, so orders and the sticky first-bad order are right when a CUDA graph replays the
launch. Integers that differ from tensor to tensor are not compiled in: there is one kernel per dtype and kind of tiles.

Results equal those of ``reference.py``, except that the order in which programs add to the two floating-point sums
varies.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.light_launch import LightLaunch
from precdoctor.recording.kernels.tiling import TILE, fits, is_aligned, tiling
from precdoctor.recording.kernels.triton_tile import FORMATS, add, as_fp32_bits, fingerprint_terms, pointer_to, tally
from precdoctor.recording.kernels.triton_window import measure_window

#: Minimum tiles per program while multiprocessors are idle, and once they are busy (the number of tiles added up at a
#: time); programs per multiprocessor in the first case, and at most.
FEWEST_TILES: Final = 8
ENOUGH_TILES: Final = 31
FEWEST_PROGRAMS: Final = 4
MOST_PROGRAMS: Final = 16
#: Launch options. Triton's default for fused multiply-adds differs by version, and from 3.9 on it warns about that.
OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False}

_NUMEL, _LAUNCHES = tl.constexpr(at.NUMEL), tl.constexpr(at.LAUNCHES)
_ORDER, _FIRST_BAD = tl.constexpr(at.ORDER), tl.constexpr(at.FIRST_BAD_ORDER)
_FINGERPRINT, _HIST = tl.constexpr(at.FINGERPRINT), tl.constexpr(at.HIST)
_PEAKS16, _PEAKS32, _PEAKS128 = (tl.constexpr(at.block_amax(size)) for size in at.BLOCK_SIZES)
# Cells that only update rows use, 0 between launches: number of programs finished, number of non-finite elements.
_DONE, _BAD = tl.constexpr(at.REL), tl.constexpr(at.REL + 1)
_TILE = tl.constexpr(TILE)


@triton.jit
def _measure_all(
    x, ints, floats, first, stop, step, numel, columns, column_stride, groups,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Count one program's share of a tensor exhaustively, in tiles that are rows of W columns."""
    G: tl.constexpr = _TILE // W
    bad = tl.zeros([], tl.int64)
    for tile in range(first, stop, step):
        group = (tl.zeros([G], tl.int64) + tile) * G + tl.arange(0, G)
        row = group // groups
        column = (group % groups * W)[:, None] + tl.arange(0, W)[None, :]
        real = (row < numel // columns)[:, None] & (column < columns)
        offset = row // (size1 * size2) * stride0 + row // size2 % size1 * stride1 + row % size2 * stride2
        loaded = tl.load(x + offset[:, None] + column * column_stride, mask=real, other=0)
        if WANT & 8:
            terms = tl.where(real, fingerprint_terms(loaded, row[:, None] * columns + column, SIZE), 0)
            tl.atomic_add(ints + _FINGERPRINT, tl.sum(tl.sum(terms, axis=1), axis=0), sem="relaxed")
        bits = as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
        bad += tally(bits, real, ints, floats, SMALLEST, LARGEST, WANT & 7, _TILE, W, SIZE == 8)
    return bad


@triton.jit
def measure_tiles(
    x, ints, floats, first, stop, step, numel, columns, column_stride, groups,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, W: tl.constexpr, FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count some tiles of a tensor into its slot. Returns the number of non-finite elements."""
    if W > 0:
        return _measure_all(
            x, ints, floats, first, stop, step, numel, columns, column_stride, groups,
            size1, size2, stride0, stride1, stride2, MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, W,
        )  # fmt: skip
    else:  # noqa: RET505 - without the else, Triton compiles both calls
        return measure_window(
            x, ints, floats, first, stop, step, numel, columns, column_stride, groups,
            size1, size2, stride0, stride1, stride2,
            MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, FLAT, ALIGNED,
        )  # fmt: skip


@triton.jit
def sign(ints, order, bad, numel, seed):
    """Write the columns of the launch as a whole; ``bad``: number of its non-finite elements."""
    tl.atomic_min(ints + _ORDER, order, sem="relaxed")
    if bad > 0:
        tl.atomic_min(ints + _FIRST_BAD, order, sem="relaxed")
    tl.atomic_add(ints + _NUMEL, numel, sem="relaxed")
    tl.atomic_add(ints + _LAUNCHES, 1, sem="relaxed")
    tl.atomic_add(ints + _FINGERPRINT, seed, sem="relaxed")


@triton.jit
def take_out(ints, padding, padding16, padding32, padding128, BLOCKS: tl.constexpr):
    """Subtract the padding that was counted as zeros, and blocks of nothing but padding."""
    add(ints + _HIST, -padding)
    if BLOCKS & 1:
        add(ints + _PEAKS16, -padding16)
    if BLOCKS & 2:
        add(ints + _PEAKS32, -padding32)
    if BLOCKS & 4:
        add(ints + _PEAKS128, -padding128)


#: Arguments that differ from tensor to tensor; Triton would compile a new kernel if one is 1 or a multiple of 16.
ARGUMENTS: Final = (
    "x", "ints", "floats", "counter", "seed", "columns", "column_stride", "groups", "tiles", "numel",
    "size1", "size2", "stride0", "stride1", "stride2", "padding", "padding16", "padding32", "padding128",
)  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def _stat(
    x: tl.int64, ints: tl.int64, floats: tl.int64, counter: tl.int64,
    seed: tl.int64, columns: tl.int64, column_stride: tl.int64, groups: tl.int32, tiles: tl.int32, numel: tl.int64,
    size1: tl.int32, size2: tl.int32, stride0: tl.int64, stride1: tl.int64, stride2: tl.int64,
    padding: tl.int64, padding16: tl.int64, padding32: tl.int64, padding128: tl.int64,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, W: tl.constexpr, FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Measure one program's tiles of one tensor. The first four arguments are addresses.

    ``groups``: per row; rows have indices over sizes (any, size1, size2).
    """
    x = pointer_to(x, SIZE, ALIGNED)
    ints = pointer_to(ints, 8, False)
    floats = floats.to(tl.pointer_type(tl.float64))
    counter = pointer_to(counter, 8, False)
    bad = measure_tiles(
        x, ints, floats, tl.program_id(0), tiles, tl.num_programs(0), numel, columns, column_stride, groups,
        size1, size2, stride0, stride1, stride2,
        MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, W, FLAT, ALIGNED,
    )  # fmt: skip
    add(ints + _BAD, bad)
    if tl.atomic_add(ints + _DONE, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        order = tl.atomic_add(counter, 1, sem="relaxed") + 1
        sign(ints, order, tl.atomic_xchg(ints + _BAD, 0, sem="relaxed"), numel, seed)
        take_out(ints, padding, padding16, padding32, padding128, WANT & 7)
        tl.atomic_xchg(ints + _DONE, 0, sem="relaxed")


def supports(x: Tensor, want: int) -> bool:
    """Whether the kernel supports the dtype, and the tensor's strides merge into few enough dimensions.

    ``want``: blocks and fingerprint, as a bit mask.
    """
    return x.dtype in FORMATS and (x.is_contiguous() or fits(x.shape, x.stride(), want))


_launch: Final = LightLaunch(_stat, OPTIONS)


def measure_at(x: Tensor, ints: int, floats: int, counter: int, want: int) -> None:
    """:func:`precdoctor.recording.kernels.reference.measure` for tensors that :func:`supports` accepts.

    Args:
        ints, floats, counter: addresses of the slot's rows.
        want: blocks and fingerprint, as a bit mask; without the fingerprint's bit the slot's stays 0.
    """
    _, *fmt = FORMATS[x.dtype]
    on = tiling(x.shape, None if x.is_contiguous() else x.stride(), x.dtype, want)
    *integers, width, flat = on
    address = x.data_ptr()
    _launch(
        programs(on.tiles, multiprocessors(x.device)), x.device,
        (address, ints, floats, counter, *integers),
        *fmt, x.element_size(), *edges(x.dtype), want, width, flat, is_aligned([address], on),
    )  # fmt: skip


def programs(tiles: int, processors: int) -> int:
    """Return how many programs share a tensor's tiles; each adds its counts to the slot once per 31 tiles.

    On an H200, reading 512 MiB of BF16 is 10 % faster with 16 programs per multiprocessor than with 4, because the
    programs then finish at about the same time.
    """
    some = min(math.ceil(tiles / FEWEST_TILES), FEWEST_PROGRAMS * processors)
    return max(some, min(math.ceil(tiles / ENOUGH_TILES), MOST_PROGRAMS * processors))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 if there is none and Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def edges(dtype: torch.dtype) -> tuple[int, int]:
    """Smallest normal and largest finite number of a dtype, as magnitude bits of FP32 or, for an FP64 tensor, FP64."""
    info, wide = torch.finfo(dtype), dtype == torch.float64
    values = torch.tensor(
        [info.smallest_normal, info.max], dtype=torch.float64 if wide else torch.float32, device="cpu"
    )
    smallest, largest = values.view(torch.int64 if wide else torch.int32).tolist()
    return smallest, largest
