"""The CUDA kernel: every statistic in one pass and one launch, on the current stream, nothing allocated or waited for.

A program loops over tiles of 2048 elements laid out as groups of at most 128 along the last dimension, so that every
block lies within a group. Classification is by integer bits, as in ``variant.c``. A histogram is counted in windows of
16 neighbouring values: each element is a one in a 4-bit field of a word, words are added, and a window costs 16 atomic
additions per tile; ordinary content needs one or two. The last program to finish advances the launch counter, so orders
and the sticky first-bad order are right when a CUDA graph replays the launch.

Same numbers as ``reference.py``; only the order in which programs add to the two floating-point sums is not fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from precdoctor.numerics import EXP_MAX, EXP_MIN
from precdoctor.recording.kernels import layout as at
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels.tiling import MAX_OUTER, TILE, tiling

#: Most programs of a launch.
PROGRAMS: Final = 1024
#: Of a launch. Triton's default for fused multiply-adds differs by version, and from 3.9 on it warns about that.
OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}

#: Per dtype: the integer to load it as, mantissa bits, exponent bias, first magnitude that is not finite, FNUZ or not.
FORMATS: Final = {
    torch.float64: (torch.int64, 52, 1023, 0x7FF << 52, False),
    torch.float32: (torch.int32, 23, 127, 0x7F800000, False),
    torch.bfloat16: (torch.int16, 7, 127, 0x7F80, False),
    torch.float16: (torch.int16, 10, 15, 0x7C00, False),
    torch.float8_e4m3fn: (torch.int8, 3, 7, 0x7F, False),
    torch.float8_e5m2: (torch.int8, 2, 15, 0x7C, False),
    torch.float8_e4m3fnuz: (torch.int8, 3, 8, 0x80, True),
    torch.float8_e5m2fnuz: (torch.int8, 2, 16, 0x80, True),
}

_NUMEL = tl.constexpr(at.NUMEL)
_LAUNCHES = tl.constexpr(at.LAUNCHES)
_ORDER = tl.constexpr(at.ORDER)
_FIRST_BAD = tl.constexpr(at.FIRST_BAD_ORDER)
_SUBNORMAL = tl.constexpr(at.SUBNORMAL)
_AT_MAX = tl.constexpr(at.AT_MAX)
_FINGERPRINT = tl.constexpr(at.FINGERPRINT)
_NAN = tl.constexpr(at.NAN)
_POS_INF = tl.constexpr(at.POS_INF)
_NEG_INF = tl.constexpr(at.NEG_INF)
_HIST = tl.constexpr(at.HIST)
_BINS = tl.constexpr(at.BLOCK_BINS)
_BLOCK16, _BLOCK32, _BLOCK128 = (tl.constexpr(at.block_hist(size)) for size in at.BLOCK_SIZES)
_TO_PEAKS = tl.constexpr(at.BLOCK_WIDTH)
# Cells that only update rows use, 0 between launches: programs that have finished, and what they found not finite.
_DONE = tl.constexpr(at.REL)
_BAD = tl.constexpr(at.REL + 1)
_EXP_MIN = tl.constexpr(EXP_MIN)
_EXP_MAX = tl.constexpr(EXP_MAX)
_GOLDEN = tl.constexpr(reference.signed32(reference.GOLDEN))
_M = tl.constexpr(reference.signed32(0x85EBCA6B))


@triton.jit
def _mix(words, index):
    """The sum's terms of ``reference.fingerprint``, for 32-bit words at an index; both int32."""
    a = (words + (index + 1) * _GOLDEN).to(tl.uint32, bitcast=True)
    a = a ^ (a >> 15)
    c = (a.to(tl.int32, bitcast=True) * _M).to(tl.uint32, bitcast=True)
    c = c ^ (c >> 13)
    return (a.to(tl.uint64) * c.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def _count(keys, hist, SIGN: tl.constexpr, N: tl.constexpr):
    """Add to ``hist[SIGN * key]`` how often each positive key occurs among N int32 keys, 16 values at a time."""
    keys = tl.reshape(keys, [N // 8, 8])
    lane = tl.arange(0, 16)
    top = tl.max(tl.max(keys, axis=1), axis=0)
    while top > 0:
        d = top - keys
        inside = (keys > 0) & (d >= 0) & (d < 16)
        ones = tl.where(inside, 1, 0).to(tl.int64) << (tl.where(inside, d, 0) * 4).to(tl.int64)
        packed = tl.sum(ones, axis=1)  # sixteen fields of four bits, none above 8
        w0 = tl.sum(packed & 0x000F000F000F000F, axis=0)  # four fields of sixteen bits: every fourth value
        w1 = tl.sum((packed >> 4) & 0x000F000F000F000F, axis=0)
        w2 = tl.sum((packed >> 8) & 0x000F000F000F000F, axis=0)
        w3 = tl.sum((packed >> 12) & 0x000F000F000F000F, axis=0)
        word = tl.where(lane % 4 == 0, w0, tl.where(lane % 4 == 1, w1, tl.where(lane % 4 == 2, w2, w3)))
        count = (word >> (lane // 4 * 16).to(tl.int64)) & 0xFFFF
        tl.atomic_add(hist + SIGN * (top - lane), count, mask=count > 0)
        rest = tl.where(d >= 16, keys, 0)
        top = tl.max(tl.max(rest, axis=1), axis=0)


@triton.jit
def _count_blocks(keys, real, row, SIZE: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Histograms of one block size. ``keys``: [G, W], 0 where there is no exponent; ``real``: inside the tensor."""
    S: tl.constexpr = SIZE if SIZE < W else W
    keys = tl.reshape(keys, [G * (W // S), S])
    peak = tl.max(keys, axis=1)
    below = tl.minimum(peak[:, None] - keys, _BINS - 1)
    _count(tl.where(keys > 0, _BINS - below, 0), row + _BINS, -1, G * W)
    _count(peak, row + _TO_PEAKS, 1, G * (W // S))
    exists = tl.max(tl.reshape(real.to(tl.int32), [G * (W // S), S]), axis=1)
    empty = tl.sum(tl.where((peak == 0) & (exists > 0), 1, 0), axis=0)
    tl.atomic_add(row + _TO_PEAKS, empty.to(tl.int64), mask=empty > 0)


@triton.jit
def _fp32_bits(
    code, MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr
):
    """Codes of a format of at most 32 bits (int32, zero-extended) as FP32 bits, without touching FP32 subnormals."""
    if SIZE == 4:
        return code
    if BIAS == 127:  # BF16
        return code << 16
    magnitude = code & ((1 << (8 * SIZE - 1)) - 1)
    sign = (code >> (8 * SIZE - 1)) << 31
    normal = (magnitude << (23 - MBITS)) + ((127 - BIAS) << 23)
    unit = tl.full([1, 1], (128 - BIAS - MBITS) << 23, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32) * unit).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < (1 << MBITS), subnormal, normal)
    bits = tl.where(magnitude >= SPECIAL, bits | 0x7F800000, bits) | sign
    if FNUZ:
        bits = tl.where(code == 0x80, 0x7FC00000, bits)
    return bits


@triton.jit
def _entry(magnitude, MBITS: tl.constexpr):
    """Histogram entry of magnitude bits, FP32 (MBITS = 23) or FP64; meaningless for zero, Inf and NaN."""
    below = magnitude - 1
    k = (below >> MBITS).to(tl.int32) - (127 if MBITS == 23 else 1023)
    if MBITS == 23:
        field = (below & 0x7FFFFF).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        k = tl.where(below < 0x800000, tl.maximum(field - 127 - 149, -150), k)
    return 1 + tl.minimum(tl.maximum(k, _EXP_MIN), _EXP_MAX) - _EXP_MIN


@triton.jit
def _fold(values, N: tl.constexpr):
    return tl.sum(tl.reshape(values, [N // 8, 8]), axis=1)


@triton.jit
def _low(packed):
    return tl.sum((packed & 0xFFFF).to(tl.int64), axis=0)


@triton.jit
def _high(packed):
    return tl.sum(((packed >> 16) & 0xFFFF).to(tl.int64), axis=0)


@triton.jit
def _add_if_any(cell, count):
    tl.atomic_add(cell, count, mask=count > 0)


@triton.jit
def _bits_and_terms(
    loaded, index,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Elements as FP32 bits (FP64: as they are), and what they add to the fingerprint."""
    if SIZE == 8:
        bits = loaded
        terms = _mix(bits.to(tl.int32), (2 * index).to(tl.int32))
        terms += _mix((bits >> 32).to(tl.int32), (2 * index + 1).to(tl.int32))
    else:
        code = loaded.to(tl.int32) & ((1 << (8 * SIZE)) - 1 if SIZE < 4 else -1)
        bits = _fp32_bits(code, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
        terms = _mix(code, index.to(tl.int32))
    return bits, terms


@triton.jit
def _sums(bits, highest, WIDE: tl.constexpr):
    """Sum and sum of squares of a tile, FP64; ``bits`` are 0 where not finite, ``highest`` the largest magnitude's."""
    if WIDE:
        value = bits.to(tl.float64, bitcast=True)
        up = (highest * 0).to(tl.float64) + 1.0
    else:  # in FP32, scaled by a power of two that keeps squares and sums in its range
        shift = tl.minimum(tl.maximum((highest >> 23) - 127, -126), 126)
        value = bits.to(tl.float32, bitcast=True) * ((127 - shift) << 23).to(tl.float32, bitcast=True)
        up = ((127 + shift) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    total = tl.sum(tl.sum(value, axis=1), axis=0).to(tl.float64) * up
    squares = tl.sum(tl.sum(value * value, axis=1), axis=0).to(tl.float64) * up * up
    return total, squares


@triton.jit
def _merge_floats(floats, amax, amin, total, squares, WIDE: tl.constexpr):
    """A program's extremes (magnitude bits) and sums into the slot."""
    if WIDE:
        largest, smallest = amax, amin
    else:  # as FP64 bits; those of numbers without sign are ordered as the numbers are, and -Inf is below
        largest = amax.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        smallest = amin.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    as_ints = floats.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_max(as_ints, largest)
    tl.atomic_min(as_ints + 1, smallest)
    tl.atomic_add(floats + 2, total)
    tl.atomic_add(floats + 3, squares)


@triton.jit
def _absorb(
    bits, terms, real, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, hist,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of N elements into a program's running numbers, its exponents into ``hist``; the keys come last."""
    TOP: tl.constexpr = (0x7FF << 52) if WIDE else 0x7F800000
    fingerprint += _fold(tl.where(real, terms, 0), N)
    magnitude = bits & (0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF)
    finite = real & (magnitude < TOP)
    nonzero = finite & (magnitude > 0)
    nan_full += _fold((real & (magnitude > TOP)).to(tl.int32) + ((magnitude == LARGEST).to(tl.int32) << 16), N)
    up_down += _fold(tl.where(magnitude == TOP, tl.where(bits < 0, 1 << 16, 1), 0), N)
    zero = (real & (magnitude == 0)).to(tl.int32)
    zero_tiny += _fold(zero + ((nonzero & (magnitude < SMALLEST)).to(tl.int32) << 16), N)
    highest = tl.max(tl.max(tl.where(finite, magnitude, 0), axis=1), axis=0)
    amax = tl.maximum(amax, highest)
    amin = tl.minimum(amin, tl.min(tl.min(tl.where(nonzero, magnitude, TOP), axis=1), axis=0))
    sums = _sums(tl.where(finite, bits, 0), highest, WIDE)
    keys = tl.where(nonzero, _entry(magnitude, 52 if WIDE else 23), 0)
    _count(keys, hist, 1, N)
    return fingerprint, nan_full, up_down, zero_tiny, amax, amin, total + sums[0], squares + sums[1], keys


@triton.jit
def _settle(ints, floats, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, WIDE: tl.constexpr):
    """A program's numbers into the slot; returns how many elements were not finite."""
    _merge_floats(floats, amax, amin, total, squares, WIDE)
    nan, ups, downs = _low(nan_full), _low(up_down), _high(up_down)
    tl.atomic_add(ints + _FINGERPRINT, tl.sum(fingerprint, axis=0))
    _add_if_any(ints + _NAN, nan)
    _add_if_any(ints + _POS_INF, ups)
    _add_if_any(ints + _NEG_INF, downs)
    _add_if_any(ints + _HIST, _low(zero_tiny))
    _add_if_any(ints + _SUBNORMAL, _high(zero_tiny))
    _add_if_any(ints + _AT_MAX, _high(nan_full))
    return nan + ups + downs


@triton.jit
def _measure_tiles(
    x, ints, floats, first, stop, step, columns, column_stride, groups, numel,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What one program does: some tiles of a tensor into its slot. Returns how many elements were not finite."""
    WIDE: tl.constexpr = SIZE == 8
    # Two counts of 16 bits to a word, and eight elements to a word: registers are what the kernel is short of.
    fingerprint = tl.zeros([G * W // 8], tl.int64)
    nan_full = tl.zeros([G * W // 8], tl.int32)
    up_down, zero_tiny = nan_full, nan_full
    amax = tl.zeros([], tl.int64 if WIDE else tl.int32)
    amin = amax + ((0x7FF << 52) if WIDE else 0x7F800000)
    total = tl.zeros([], tl.float64)
    squares = total
    for tile in range(first, stop, step):
        group = (tl.zeros([G], tl.int64) + tile) * G + tl.arange(0, G)
        row = group // groups
        column = (group % groups * W)[:, None] + tl.arange(0, W)[None, :]
        real = (row < numel // columns)[:, None] & (column < columns)
        offset = row // (size1 * size2) * stride0 + row // size2 % size1 * stride1 + row % size2 * stride2
        loaded = tl.load(x + offset[:, None] + column * column_stride, mask=real, other=0)
        bits, terms = _bits_and_terms(loaded, row[:, None] * columns + column, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
        fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, keys = _absorb(
            bits, terms, real, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, ints + _HIST,
            SMALLEST, LARGEST, G * W, WIDE,
        )  # fmt: skip
        if WANT & 1:
            _count_blocks(keys, real, ints + _BLOCK16, 16, G, W)
        if WANT & 2:
            _count_blocks(keys, real, ints + _BLOCK32, 32, G, W)
        if WANT & 4:
            _count_blocks(keys, real, ints + _BLOCK128, 128, G, W)
    return _settle(ints, floats, fingerprint, nan_full, up_down, zero_tiny, amax, amin, total, squares, WIDE)


@triton.jit
def _sign(ints, order, bad, numel, seed):
    """The columns that speak of the launch as a whole; ``bad``: how many elements of it were not finite."""
    tl.atomic_min(ints + _ORDER, order)
    if bad > 0:
        tl.atomic_min(ints + _FIRST_BAD, order)
    tl.atomic_add(ints + _NUMEL, numel)
    tl.atomic_add(ints + _LAUNCHES, 1)
    tl.atomic_add(ints + _FINGERPRINT, seed)


@triton.jit
def _stat(
    x, ints, floats, counter, columns, column_stride, groups, tiles, numel, seed,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """``x``: integers of the element's size. ``groups``: per row; rows have indices over sizes (any, size1, size2)."""
    bad = _measure_tiles(
        x, ints, floats, tl.program_id(0), tiles, tl.num_programs(0), columns, column_stride, groups, numel,
        size1, size2, stride0, stride1, stride2,
        MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, G, W,
    )  # fmt: skip
    _add_if_any(ints + _BAD, bad)
    if tl.atomic_add(ints + _DONE, 1) == tl.num_programs(0) - 1:
        order = tl.atomic_add(counter, 1) + 1
        _sign(ints, order, tl.atomic_xchg(ints + _BAD, 0), numel, seed)
        tl.atomic_xchg(ints + _DONE, 0)


def supports(x: Tensor) -> bool:
    """Whether the kernel knows the dtype and the tensor's strides merge into few enough dimensions."""
    return x.dtype in FORMATS and (x.is_contiguous() or len(at.walk(x.shape, x.stride())[1]) <= MAX_OUTER)


def measure(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> None:
    """Same contract as :func:`precdoctor.recording.kernels.reference.measure`, for tensors that :func:`supports`."""
    container, *fmt = FORMATS[x.dtype]
    on = tiling(x.shape, None if x.is_contiguous() else x.stride(), x.dtype)
    launch: Any = _stat[(min(on.tiles, PROGRAMS),)]
    launch(
        x.detach().view(container), ints, floats, counter,
        on.columns, on.column_stride, on.groups, on.tiles, on.numel, on.seed,
        on.size1, on.size2, on.stride0, on.stride1, on.stride2,
        *fmt, x.element_size(), *edges(x.dtype),
        sum(1 << at.BLOCK_SIZES.index(size) for size in blocks), TILE // on.width, on.width,
        **OPTIONS,
    )  # fmt: skip


@functools.cache
def edges(dtype: torch.dtype) -> tuple[int, int]:
    """Smallest normal number and largest finite one, as the magnitude bits the kernel compares: FP32's or FP64's."""
    info, wide = torch.finfo(dtype), dtype == torch.float64
    values = torch.tensor(
        [info.smallest_normal, info.max], dtype=torch.float64 if wide else torch.float32, device="cpu"
    )
    smallest, largest = values.view(torch.int64 if wide else torch.int32).tolist()
    return smallest, largest
