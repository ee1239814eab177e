"""Many tensors in one launch of the CUDA kernel; the same numbers as one launch of ``triton_kernel.py`` per tensor.

A table on the device has one row per tensor: address, slot and tiling. A second table holds the tensor of each
program; the program counts ``chunk`` consecutive tiles of that tensor. ``batched.py`` writes both. Tensors of one
launch have the same dtype, layout and block sizes, because these are compiled in. The last program of a tensor signs
its slot, the last of all advances the launch counter by the number of tensors: each gets the order it would have had
in a launch of its own.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from precdoctor.recording.kernels import batched
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.light_launch import LightLaunch
from precdoctor.recording.kernels.triton_kernel import OPTIONS, edges, measure_tiles, sign, take_out
from precdoctor.recording.kernels.triton_tile import FORMATS, add, pointer_to
from precdoctor.recording.kernels.triton_update import measure_update

_COLUMNS = tl.constexpr(batched.FIELDS)
_X, _Y, _Z, _INTS, _FLOATS, _FIRST = (tl.constexpr(i) for i in range(6))
(
    _SEED, _WIDE_COLUMNS, _COLUMN_STRIDE, _GROUPS, _TILES, _NUMEL, _SIZE1, _SIZE2, _STRIDE0, _STRIDE1, _STRIDE2,
    _PADDING, _PADDING16, _PADDING32, _PADDING128,
) = (tl.constexpr(batched.TILING + i) for i in range(15))  # fmt: skip
# Cells of a slot that launches of this kind do not use, 0 between launches: programs finished, non-finite elements.
_STAT_SCRATCH = tl.constexpr(at.REL)
_UPDATE_SCRATCH = tl.constexpr(at.block_hist(16))
_ORDER, _FIRST_BAD, _NEVER = tl.constexpr(at.ORDER), tl.constexpr(at.FIRST_BAD_ORDER), tl.constexpr(at.NEVER)
_AMAX, _AMIN, _INF = tl.constexpr(at.AMAX), tl.constexpr(at.AMIN), tl.constexpr(math.inf)
_INT_CELLS, _FLOAT_CELLS = (tl.constexpr(triton.next_power_of_2(n)) for n in (at.INT_WIDTH, at.FLOAT_WIDTH))
_INTS_IN_ROW, _FLOATS_IN_ROW = tl.constexpr(at.INT_WIDTH), tl.constexpr(at.FLOAT_WIDTH)
#: Arguments that differ from launch to launch; Triton would compile a new kernel if one is 1 or a multiple of 16.
_ARGUMENTS: Final = ("table", "owners", "done", "counter", "count", "chunk")


@triton.jit
def _slot(row):
    """Return pointers to the integer and float row of the slot of a table row."""
    ints = tl.load(row + _INTS).to(tl.pointer_type(tl.int64))
    floats = tl.load(row + _FLOATS).to(tl.pointer_type(tl.float64))
    return ints, floats


@triton.jit
def _leave(row, index, ints, scratch, bad, done, counter, count, chunk, BLOCKS: tl.constexpr):
    """Finish a program. The last of a tensor (row ``index`` of ``count``) signs its slot; the last of all counts."""
    add(scratch + 1, bad)
    programs = (tl.load(row + _TILES) + chunk - 1) // chunk
    if tl.atomic_add(scratch, 1, sem="acq_rel") == programs - 1:
        order = tl.atomic_add(counter, 0, sem="relaxed") + 1 + index
        bad = tl.atomic_xchg(scratch + 1, 0, sem="relaxed")
        sign(ints, order, bad, tl.load(row + _NUMEL), tl.load(row + _SEED))
        take_out(
            ints, tl.load(row + _PADDING), tl.load(row + _PADDING16), tl.load(row + _PADDING32),
            tl.load(row + _PADDING128), BLOCKS,
        )  # fmt: skip
        tl.atomic_xchg(scratch, 0, sem="relaxed")
    if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.atomic_add(counter, count, sem="relaxed")
        tl.atomic_xchg(done, 0, sem="relaxed")


@triton.jit(do_not_specialize=_ARGUMENTS)
def _stat_many(
    table: tl.int64, owners: tl.int64, done: tl.int64, counter: tl.int64, count: tl.int32, chunk: tl.int32,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, W: tl.constexpr, FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Measure one program's tiles of a table's tensors. The first four arguments are addresses."""
    index = tl.load(pointer_to(owners, 4, False) + tl.program_id(0)).to(tl.int64)
    row = pointer_to(table, 8, False) + index * _COLUMNS
    x = pointer_to(tl.load(row + _X), SIZE, ALIGNED)
    ints, floats = _slot(row)
    first = (tl.program_id(0) - tl.load(row + _FIRST)).to(tl.int32) * chunk
    stop = tl.minimum(first + chunk, tl.load(row + _TILES).to(tl.int32))
    bad = measure_tiles(
        x, ints, floats, first, stop, 1, tl.load(row + _NUMEL), tl.load(row + _WIDE_COLUMNS),
        tl.load(row + _COLUMN_STRIDE), tl.load(row + _GROUPS).to(tl.int32),
        tl.load(row + _SIZE1).to(tl.int32), tl.load(row + _SIZE2).to(tl.int32),
        tl.load(row + _STRIDE0), tl.load(row + _STRIDE1), tl.load(row + _STRIDE2),
        MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, W, FLAT, ALIGNED,
    )  # fmt: skip
    _leave(
        row, index, ints, ints + _STAT_SCRATCH, bad, pointer_to(done, 8, False), pointer_to(counter, 8, False),
        count, chunk, WANT & 7,
    )  # fmt: skip


@triton.jit(do_not_specialize=("table",))
def _restart_many(table: tl.int64):
    """One program per tensor: reset its slot to the state before the first launch, except for its first bad order."""
    ints, floats = _slot(pointer_to(table, 8, False) + tl.program_id(0).to(tl.int64) * _COLUMNS)
    cell = tl.arange(0, _INT_CELLS)
    fresh = tl.where(cell == _ORDER, _NEVER, 0).to(tl.int64)
    tl.store(ints + cell, fresh, mask=(cell < _INTS_IN_ROW) & (cell != _FIRST_BAD))
    cell = tl.arange(0, _FLOAT_CELLS)
    none = tl.where(cell == _AMAX, -_INF, tl.where(cell == _AMIN, _INF, 0.0)).to(tl.float64)
    tl.store(floats + cell, none, mask=cell < _FLOATS_IN_ROW)


@triton.jit(do_not_specialize=_ARGUMENTS)
def _update_many(
    table: tl.int64, owners: tl.int64, done: tl.int64, counter: tl.int64, count: tl.int32, chunk: tl.int32,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Measure one program's tiles of a table's updates. The first four arguments are addresses."""
    index = tl.load(pointer_to(owners, 4, False) + tl.program_id(0)).to(tl.int64)
    row = pointer_to(table, 8, False) + index * _COLUMNS
    before = pointer_to(tl.load(row + _X), SIZE, ALIGNED)
    after = pointer_to(tl.load(row + _Y), SIZE, ALIGNED)
    intended = pointer_to(tl.load(row + _Z), INTENDED, ALIGNED)
    ints, floats = _slot(row)
    numel = tl.load(row + _NUMEL)
    first = (tl.program_id(0) - tl.load(row + _FIRST)).to(tl.int32) * chunk
    stop = tl.minimum(first + chunk, tl.load(row + _TILES).to(tl.int32))
    bad = measure_update(
        before, after, intended, ints, floats, first, stop, numel,
        MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, INTENDED, ALIGNED,
    )  # fmt: skip
    _leave(
        row, index, ints, ints + _UPDATE_SCRATCH, bad, pointer_to(done, 8, False), pointer_to(counter, 8, False),
        count, chunk, 0,
    )  # fmt: skip


def launch(group: batched.Group, table: batched.Table, counter: Tensor) -> None:
    """Measure the tensors of a group, whose table must be up to date.

    ``counter``: the device's launch counter; advanced by the number of tensors.
    """
    _, *fmt = FORMATS[group.dtype]
    size = torch.empty(0, dtype=group.dtype, device="cpu").element_size()
    rows = table.rows.data_ptr()
    if group.restart:
        _restart(table.count, group.device, (rows,))
    arguments = (
        rows, table.owners.data_ptr(), table.done.data_ptr(), counter.data_ptr(), table.count, table.chunk,
    )  # fmt: skip
    if group.intended is not None:
        intended = 8 if group.intended == torch.float64 else 4
        of_update = *fmt, size, *edges(torch.float32), intended, group.aligned
        _update(table.programs, group.device, arguments, *of_update)
        return
    constants = *fmt, size, *edges(group.dtype), group.want, group.width, group.flat, group.aligned
    _stat(table.programs, group.device, arguments, *constants)


_restart: Final = LightLaunch(_restart_many, OPTIONS)
_update: Final = LightLaunch(_update_many, OPTIONS)
_stat: Final = LightLaunch(_stat_many, OPTIONS)
