"""Many tensors in one launch of the CUDA kernel; the same numbers as ``triton_kernel.py`` gives one after the other.

A table on the device has a row for each tensor: where it lies, where its slot lies, how it is tiled. A second one says
of every program which tensor it belongs to; a program takes ``CHUNK`` neighbouring tiles of that one. Both are written
by ``batched.py`` and read here. Tensors of one launch have their dtype, tile width and block sizes in common, because
those are compiled into it. The last program of a tensor signs its slot, the last of all advances the launch counter by
as many orders as there were tensors: each gets the order it would have had by itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from precdoctor.recording.kernels import batched
from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels.tiling import TILE, WIDTH
from precdoctor.recording.kernels.triton_kernel import (
    FORMATS,
    OPTIONS,
    _absorb,
    _add_if_any,
    _bits_and_terms,
    _count,
    _entry,
    _fp32_bits,
    _measure_tiles,
    _settle,
    _sign,
    edges,
)

_COLUMNS = tl.constexpr(batched.FIELDS)
_X, _Y, _Z, _INTS, _FLOATS, _FIRST = (tl.constexpr(i) for i in range(6))
(
    _SEED, _WIDE_COLUMNS, _COLUMN_STRIDE, _GROUPS, _TILES, _NUMEL, _SIZE1, _SIZE2, _STRIDE0, _STRIDE1, _STRIDE2,
) = (tl.constexpr(batched.TILING + i) for i in range(11))  # fmt: skip
_CHUNK = tl.constexpr(batched.CHUNK)
# Cells of a slot that launches of a kind do not use, 0 between launches: programs that have finished, bad elements.
_STAT_SCRATCH = tl.constexpr(at.REL)
_UPDATE_SCRATCH = tl.constexpr(at.block_hist(16))
_HIST, _REL, _UNCHANGED = tl.constexpr(at.HIST), tl.constexpr(at.REL), tl.constexpr(at.UNCHANGED)
_REL_MIN, _REL_MAX = tl.constexpr(at.REL_MIN), tl.constexpr(at.REL_MAX)
_ORDER, _FIRST_BAD = tl.constexpr(at.ORDER), tl.constexpr(at.FIRST_BAD_ORDER)
_NEVER, _WIDTH = tl.constexpr(at.NEVER), tl.constexpr(WIDTH)
_AMAX, _AMIN, _INF = tl.constexpr(at.AMAX), tl.constexpr(at.AMIN), tl.constexpr(math.inf)
_INT_CELLS, _FLOAT_CELLS = (tl.constexpr(triton.next_power_of_2(n)) for n in (at.INT_WIDTH, at.FLOAT_WIDTH))
_INTS_IN_ROW, _FLOATS_IN_ROW = tl.constexpr(at.INT_WIDTH), tl.constexpr(at.FLOAT_WIDTH)


@triton.jit
def _pointer(address, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address as a pointer to integers of SIZE bytes."""
    if SIZE == 1:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif SIZE == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif SIZE == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _slot(row):
    ints = tl.load(row + _INTS).to(tl.pointer_type(tl.int64))
    floats = tl.load(row + _FLOATS).to(tl.pointer_type(tl.float64))
    return ints, floats


@triton.jit
def _leave(row, index, ints, scratch, bad, done, counter, count):
    """What a program does last: ``index`` is that of its tensor among ``count``."""
    _add_if_any(scratch + 1, bad)
    programs = (tl.load(row + _TILES) + _CHUNK - 1) // _CHUNK
    if tl.atomic_add(scratch, 1) == programs - 1:
        order = tl.atomic_add(counter, 0) + 1 + index
        _sign(ints, order, tl.atomic_xchg(scratch + 1, 0), tl.load(row + _NUMEL), tl.load(row + _SEED))
        tl.atomic_xchg(scratch, 0)
    if tl.atomic_add(done, 1) == tl.num_programs(0) - 1:
        tl.atomic_add(counter, count)
        tl.atomic_xchg(done, 0)


@triton.jit
def _stat_many(
    table, owners, done, counter, count,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """``ALIGNED``: rows of every tensor are in one piece, start at multiples of 16 bytes and of 16 elements."""
    index = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = table + index * _COLUMNS
    x = _pointer(tl.load(row + _X), SIZE, ALIGNED)
    ints, floats = _slot(row)
    first = (tl.program_id(0) - tl.load(row + _FIRST)) * _CHUNK
    stop = tl.minimum(first + _CHUNK, tl.load(row + _TILES))
    columns, column_stride = tl.load(row + _WIDE_COLUMNS), tl.load(row + _COLUMN_STRIDE)
    stride0, stride1, stride2 = tl.load(row + _STRIDE0), tl.load(row + _STRIDE1), tl.load(row + _STRIDE2)
    if ALIGNED:  # what Triton finds out by itself where these are arguments
        columns, column_stride = tl.multiple_of(columns, 16), 1
        stride0, stride1 = tl.multiple_of(stride0, 16), tl.multiple_of(stride1, 16)
        stride2 = tl.multiple_of(stride2, 16)
    bad = _measure_tiles(
        x, ints, floats, first, stop, 1, columns, column_stride, tl.load(row + _GROUPS), tl.load(row + _NUMEL),
        tl.load(row + _SIZE1), tl.load(row + _SIZE2), stride0, stride1, stride2,
        MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, G, W,
    )  # fmt: skip
    _leave(row, index, ints, ints + _STAT_SCRATCH, bad, done, counter, count)


@triton.jit
def _restart_many(table):
    """A program a tensor: its slot as before the first launch, but for when it was first bad."""
    ints, floats = _slot(table + tl.program_id(0).to(tl.int64) * _COLUMNS)
    cell = tl.arange(0, _INT_CELLS)
    fresh = tl.where(cell == _ORDER, _NEVER, 0).to(tl.int64)
    tl.store(ints + cell, fresh, mask=(cell < _INTS_IN_ROW) & (cell != _FIRST_BAD))
    cell = tl.arange(0, _FLOAT_CELLS)
    none = tl.where(cell == _AMAX, -_INF, tl.where(cell == _AMIN, _INF, 0.0)).to(tl.float64)
    tl.store(floats + cell, none, mask=cell < _FLOATS_IN_ROW)


@triton.jit
def _update_many(
    table, owners, done, counter, count,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """``reference.measure_update`` of contiguous weights (before, after: at most 32 bits) and intentions (INTENDED
    bytes); ``SMALLEST`` and ``LARGEST`` are FP32's, in which the difference is taken.
    """
    index = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = table + index * _COLUMNS
    before = _pointer(tl.load(row + _X), SIZE, ALIGNED)
    after = _pointer(tl.load(row + _Y), SIZE, ALIGNED)
    intended = _pointer(tl.load(row + _Z), INTENDED, ALIGNED)
    ints, floats = _slot(row)
    numel = tl.load(row + _NUMEL)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    first = (tl.program_id(0) - tl.load(row + _FIRST)) * _CHUNK
    stop = tl.minimum(first + _CHUNK, tl.load(row + _TILES))
    fingerprint = tl.zeros([N // 8], tl.int64)
    nan_full = tl.zeros([N // 8], tl.int32)
    up_down, zero_tiny = nan_full, nan_full
    amax = tl.zeros([], tl.int32)
    amin = amax + 0x7F800000
    total = tl.zeros([], tl.float64)
    squares = total
    unchanged = tl.zeros([], tl.int64)
    for tile in range(first, stop, 1):
        at_ = tile * N + (tl.arange(0, N // _WIDTH) * _WIDTH)[:, None] + tl.arange(0, _WIDTH)[None, :]
        real = at_ < numel
        old, new = tl.load(before + at_, mask=real, other=0), tl.load(after + at_, mask=real, other=0)
        code = old.to(tl.int32) & ((1 << (8 * SIZE)) - 1 if SIZE < 4 else -1)
        weight = _fp32_bits(code, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
        code = new.to(tl.int32) & ((1 << (8 * SIZE)) - 1 if SIZE < 4 else -1)
        stored = _fp32_bits(code, MBITS, BIAS, SPECIAL, FNUZ, SIZE).to(tl.float32, bitcast=True)
        change = (stored - weight.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        bits, terms = _bits_and_terms(change, at_, 23, 127, 0x7F800000, False, 4)
        fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, _ = _absorb(
            bits, terms, real, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, ints + _HIST,
            SMALLEST, LARGEST, N, False,
        )  # fmt: skip
        magnitude = tl.load(intended + at_, mask=real, other=0) & (0x7FFFFFFF if INTENDED == 4 else 0x7FFFFFFFFFFFFFFF)
        wanted = (magnitude > 0) & (magnitude < (0x7F800000 if INTENDED == 4 else 0x7FF << 52))
        same = tl.where(wanted & (old == new), 1, 0)
        unchanged += tl.sum(tl.sum(same, axis=1), axis=0).to(tl.int64)
        weight = weight & 0x7FFFFFFF
        relative = _entry(magnitude, 23 if INTENDED == 4 else 52) - _entry(weight, 23)
        relative = tl.minimum(tl.maximum(relative, _REL_MIN), _REL_MAX) - _REL_MIN
        _count(tl.where(wanted & (weight > 0) & (weight < 0x7F800000), relative + 1, 0), ints + _REL - 1, 1, N)
    bad = _settle(ints, floats, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, False)
    _add_if_any(ints + _UNCHANGED, unchanged)
    _leave(row, index, ints, ints + _UPDATE_SCRATCH, bad, done, counter, count)


def launch(group: batched.Group, table: batched.Table, counter: Tensor) -> None:
    """Measure the tensors of a group, whose table has been brought up to date.

    Args:
        group: what they have in common.
        table: on their device.
        counter: the device's launch counter; advanced by the number of tensors.
    """
    _, *fmt = FORMATS[group.dtype]
    size = torch.empty(0, dtype=group.dtype, device="cpu").element_size()
    if group.restart:
        restart: Any = _restart_many[(table.count,)]
        restart(table.rows, **OPTIONS)
    shared = (table.rows, table.owners, table.done, counter, table.count, *fmt, size)
    if group.intended is not None:
        update: Any = _update_many[(table.programs,)]
        intended = 8 if group.intended == torch.float64 else 4
        update(*shared, *edges(torch.float32), intended, TILE, group.aligned, **OPTIONS)
        return
    stat: Any = _stat_many[(table.programs,)]
    stat(*shared, *edges(group.dtype), group.want, TILE // group.width, group.width, group.aligned, **OPTIONS)
