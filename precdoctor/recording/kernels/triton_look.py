"""Amax and sum of squares over many tensors in one launch: the check of the gradients in every step.

Each program reads some tiles of one tensor and stores two partial results; the last program to finish merges them, in
the order of the programs, so that the same gradients give the same bits. Squares are added up in FP32, of magnitudes
between 2^-40 and 2^40 unscaled, of others scaled by 2^80 or 2^-80, so that none leaves the range (J. L. Blue, "A
Portable Fortran Program to Find the Euclidean Norm of a Vector", 1978).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from precdoctor.recording.kernels.light_launch import LightLaunch
from precdoctor.recording.kernels.triton_kernel import OPTIONS
from precdoctor.recording.kernels.triton_tile import FORMATS, as_fp32_bits, pointer_to

#: Fields of a row of the table: address, elements, first program.
FIELDS: Final = 3
LANES: Final = 128
_FIELDS, _LANES = tl.constexpr(FIELDS), tl.constexpr(LANES)
_MERGED = tl.constexpr(1024)
_LARGE, _TINY = tl.constexpr(2.0**40), tl.constexpr(2.0**-40)
_DOWN, _UP = tl.constexpr(2.0**-80), tl.constexpr(2.0**80)
_DOWN_SQUARED, _UP_SQUARED = tl.constexpr(2.0**-160), tl.constexpr(2.0**160)
_ARGUMENTS: Final = ("rows", "owners", "partial", "out", "done", "chunk")


@triton.jit
def _squares(magnitude, middle, large, tiny):
    """Add the squares of a tile's magnitudes, shape [LANES, E], to the sums of its lanes."""
    value = magnitude.to(tl.float32, bitcast=True)
    is_large, is_tiny = value > _LARGE, value < _TINY
    down, up = tl.where(is_large, value, 0.0) * _DOWN, tl.where(is_tiny, value, 0.0) * _UP
    value = tl.where(is_large | is_tiny, 0.0, value)
    return middle + tl.sum(value * value, axis=1), large + tl.sum(down * down, axis=1), tiny + tl.sum(up * up, axis=1)


@triton.jit(do_not_specialize=_ARGUMENTS)
def _look_many(
    rows: tl.int64, owners: tl.int64, partial: tl.int64, out: tl.int64, done: tl.int64, chunk: tl.int32,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Measure one program's tiles, and merge the results in the last program. The first five arguments are addresses.

    ``partial``: FP64, two results per program; ``out``: FP64, amax and sum of squares.
    """
    E: tl.constexpr = 4 if SIZE == 4 else 8
    row = pointer_to(rows, 8, False) + tl.load(pointer_to(owners, 4, False) + tl.program_id(0)).to(tl.int64) * _FIELDS
    x, numel = pointer_to(tl.load(row), SIZE, ALIGNED), tl.load(row + 1)
    whole, tiles = numel // E * E, (numel + _LANES * E - 1) // (_LANES * E)
    first = (tl.program_id(0) - tl.load(row + 2)) * chunk
    stop = tl.minimum(first + chunk, tiles)
    lane, e = tl.arange(0, _LANES)[:, None] * E, tl.arange(0, E)[None, :]
    # The remainder of a tensor after its last whole lane.
    rest = whole + lane + e
    loaded = tl.load(x + rest, mask=rest < tl.where(stop == tiles, numel, 0), other=0)
    magnitude = as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE) & 0x7FFFFFFF
    amax, none = tl.max(magnitude, axis=1), tl.zeros([_LANES], tl.float32)
    middle, large, tiny = _squares(magnitude, none, none, none)
    for tile in range(first, stop):
        start = tile * (_LANES * E)
        real = (lane < whole - start) & (e >= 0)
        loaded = tl.load(x + start + (lane + e), mask=real, other=0)
        magnitude = as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE) & 0x7FFFFFFF
        amax = tl.maximum(amax, tl.max(magnitude, axis=1))
        middle, large, tiny = _squares(magnitude, middle, large, tiny)
    squares = tl.sum(middle).to(tl.float64) + tl.sum(large).to(tl.float64) * _UP_SQUARED
    squares += tl.sum(tiny).to(tl.float64) * _DOWN_SQUARED
    results = partial.to(tl.pointer_type(tl.float64))
    programs = tl.num_programs(0)
    tl.store(results + tl.program_id(0), tl.max(amax).to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(results + programs + tl.program_id(0), squares)
    done = pointer_to(done, 8, False)
    if tl.atomic_add(done, 1, sem="acq_rel") == programs - 1:
        highest, total = tl.zeros([_MERGED], tl.int64), tl.zeros([_MERGED], tl.float64)
        for begin in range(0, programs, _MERGED):
            at = begin + tl.arange(0, _MERGED)
            found = tl.load(results + at, mask=at < programs, other=0.0, cache_modifier=".cg")
            highest = tl.maximum(highest, found.to(tl.int64, bitcast=True))
            total += tl.load(results + programs + at, mask=at < programs, other=0.0, cache_modifier=".cg")
        to = out.to(tl.pointer_type(tl.float64))
        tl.store(to, tl.max(highest).to(tl.float64, bitcast=True))
        tl.store(to + 1, tl.sum(total))
        tl.atomic_xchg(done, 0, sem="relaxed")


_look: Final = LightLaunch(_look_many, OPTIONS)


def launch(
    device: torch.device, programs: int, addresses: tuple[int, ...], chunk: int, dtype: torch.dtype, *, aligned: bool
) -> None:
    """Compute amax and sum of squares of the tensors of a table.

    Args:
        device: the current one.
        addresses: of ``rows, owners, partial, out, done``.
        dtype: at most 32 bits.
        aligned: whether all addresses of tensors are multiples of 16.
    """
    integer, *fmt = FORMATS[dtype]
    _look(programs, device, (*addresses, chunk), *fmt, integer.itemsize, aligned)
