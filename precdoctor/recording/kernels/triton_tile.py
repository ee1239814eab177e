"""Exhaustive counting of one tile: handles all values, slowly. Both CUDA kernels fall back to it.

Classification is by integer bits, as in ``variant.c``. A histogram is counted in windows of 16 neighbouring values:
each element is a one in a 4-bit field of a word, words are added, and a window costs 16 atomic additions. Every result
goes straight into the slot, by relaxed atomics: nothing of a tile stays in registers.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from precdoctor.numerics import EXP_MAX, EXP_MIN
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at

#: Per dtype: the integer to load it as, mantissa bits, exponent bias, first magnitude that is not finite, whether FNUZ.
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

_SUBNORMAL = tl.constexpr(at.SUBNORMAL)
_AT_MAX = tl.constexpr(at.AT_MAX)
_NAN = tl.constexpr(at.NAN)
_POS_INF = tl.constexpr(at.POS_INF)
_NEG_INF = tl.constexpr(at.NEG_INF)
_HIST = tl.constexpr(at.HIST)
_BINS = tl.constexpr(at.BLOCK_BINS)
_BLOCK16, _BLOCK32, _BLOCK128 = (tl.constexpr(at.block_hist(size)) for size in at.BLOCK_SIZES)
_TO_PEAKS = tl.constexpr(at.BLOCK_WIDTH)
_EXP_MIN = tl.constexpr(EXP_MIN)
_EXP_MAX = tl.constexpr(EXP_MAX)
_GOLDEN = tl.constexpr(reference.signed32(reference.GOLDEN))
_M = tl.constexpr(reference.signed32(0x85EBCA6B))


@triton.jit
def add(cell, count):
    """Add to cells of a slot, in any order; counts of 0 cost no memory access."""
    tl.atomic_add(cell, count, mask=count != 0, sem="relaxed")


@triton.jit
def pointer_to(address, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address as a pointer to integers of SIZE bytes; ``ALIGNED``: it is a multiple of 16."""
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
def _mix(words, index):
    """Return the terms of ``reference.fingerprint`` for 32-bit words at an index; both int32."""
    a = (words + (index + 1) * _GOLDEN).to(tl.uint32, bitcast=True)
    a = a ^ (a >> 15)
    c = (a.to(tl.int32, bitcast=True) * _M).to(tl.uint32, bitcast=True)
    c = c ^ (c >> 13)
    return (a.to(tl.uint64) * c.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def fingerprint_terms(loaded, index, SIZE: tl.constexpr):
    """Return what each loaded element adds to the fingerprint, given its logical index; int64."""
    if SIZE == 8:
        terms = _mix(loaded.to(tl.int32), (2 * index).to(tl.int32))
        terms += _mix((loaded >> 32).to(tl.int32), (2 * index + 1).to(tl.int32))
    else:
        terms = _mix(loaded.to(tl.int32) & ((1 << (8 * SIZE)) - 1 if SIZE < 4 else -1), index.to(tl.int32))
    return terms


@triton.jit
def as_fp32_bits(
    loaded, MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr
):
    """Convert loaded elements of at most 32 bits to FP32 bits, without touching FP32 subnormals. FP64 is unchanged."""
    if SIZE >= 4:
        bits = loaded
    elif BIAS == 127:  # BF16
        bits = loaded.to(tl.int32) << 16
    elif SIZE == 2:  # FP16
        bits = loaded.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        code = loaded.to(tl.int32) & 0xFF
        magnitude = code & 0x7F
        normal = (magnitude << (23 - MBITS)) + ((127 - BIAS) << 23)
        unit = (magnitude * 0 + ((128 - BIAS - MBITS) << 23)).to(tl.float32, bitcast=True)
        subnormal = (magnitude.to(tl.float32) * unit).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < (1 << MBITS), subnormal, normal)
        bits = tl.where(magnitude >= SPECIAL, bits | 0x7F800000, bits) | ((code >> 7) << 31)
        if FNUZ:
            bits = tl.where(code == 0x80, 0x7FC00000, bits)
    return bits


@triton.jit
def entry_of(magnitude, MBITS: tl.constexpr):
    """Return the histogram entry of magnitude bits, FP32 (MBITS = 23) or FP64; meaningless for zero, Inf and NaN."""
    below = magnitude - 1
    k = (below >> MBITS).to(tl.int32) - (127 if MBITS == 23 else 1023)
    if MBITS == 23:
        field = (below & 0x7FFFFF).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        k = tl.where(below < 0x800000, tl.maximum(field - 127 - 149, -150), k)
    return 1 + tl.minimum(tl.maximum(k, _EXP_MIN), _EXP_MAX) - _EXP_MIN


@triton.jit
def count_keys(keys, hist, SIGN: tl.constexpr, N: tl.constexpr):
    """Add to ``hist[SIGN * key]`` how often each positive key occurs among N int32 keys, 16 values at a time."""
    ROW: tl.constexpr = 8 if N >= 64 else 1
    keys = tl.reshape(keys, [N // ROW, ROW])
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
        add(hist + SIGN * (top - lane), (word >> (lane // 4 * 16).to(tl.int64)) & 0xFFFF)
        top = tl.max(tl.max(tl.where(keys <= top - 16, keys, 0), axis=1), axis=0)


@triton.jit
def _count_blocks(keys, real, row, SIZE: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Count histograms of one block size. ``keys``: N in rows of W, 0 without exponent; ``real``: not padding."""
    S: tl.constexpr = SIZE if SIZE < W else W
    keys = tl.reshape(keys, [N // S, S])
    peak = tl.max(keys, axis=1)
    below = tl.minimum(peak[:, None] - keys, _BINS - 1)
    count_keys(tl.where(keys > 0, _BINS - below, 0), row + _BINS, -1, N)
    count_keys(peak, row + _TO_PEAKS, 1, N // S)
    exists = tl.max(tl.reshape(real.to(tl.int32), [N // S, S]), axis=1)
    add(row + _TO_PEAKS, tl.sum(tl.where((peak == 0) & (exists > 0), 1, 0), axis=0).to(tl.int64))


@triton.jit
def _all(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _counts(packed):
    """Sum three 10-bit counts, packed in each element, over a tile; the result packs three 20-bit counts."""
    rows = tl.sum(packed, axis=1)
    wide = (rows & 0x3FF).to(tl.int64) + ((rows & 0xFFC00).to(tl.int64) << 10)
    return tl.sum(wide + ((rows & 0x3FF00000).to(tl.int64) << 20), axis=0)


@triton.jit
def merge_extremes(floats, largest, smallest, WIDE: tl.constexpr):
    """Merge magnitude bits (FP32's; FP64's if WIDE) of the largest and smallest non-zero element into the slot."""
    if not WIDE:  # to FP64 bits; those of numbers without sign are ordered as the numbers are, and -Inf is below
        largest = largest.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        smallest = smallest.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    as_ints = floats.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_max(as_ints, largest, sem="relaxed")
    tl.atomic_min(as_ints + 1, smallest, sem="relaxed")


@triton.jit
def _add_sums(floats, bits, highest, WIDE: tl.constexpr):
    """Add sum and sum of squares of a tile; ``bits``: 0 if not finite; ``highest``: the largest magnitude bits."""
    if WIDE:
        value = bits.to(tl.float64, bitcast=True)
        up = (highest * 0).to(tl.float64) + 1.0
    else:  # in FP32, scaled by a power of two that keeps squares and sums in its range
        shift = tl.minimum(tl.maximum((highest >> 23) - 127, -126), 126)
        value = bits.to(tl.float32, bitcast=True) * ((127 - shift) << 23).to(tl.float32, bitcast=True)
        up = ((127 + shift) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    tl.atomic_add(floats + 2, _all(value).to(tl.float64) * up, sem="relaxed")
    tl.atomic_add(floats + 3, _all(value * value).to(tl.float64) * up * up, sem="relaxed")


@triton.jit
def tally(
    bits, real, ints, floats, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, BLOCKS: tl.constexpr,
    N: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Count everything about a tile except its fingerprint into the slot. Returns the number of non-finite elements.

    ``bits``: FP32's, FP64's if WIDE; shape [N // W, W], rows run along the last dimension. ``real``: not padding.
    ``SMALLEST``: normal number; ``LARGEST``: finite one; both as magnitude bits. ``BLOCKS``: sizes, as a bit mask.
    """
    TOP: tl.constexpr = (0x7FF << 52) if WIDE else 0x7F800000
    magnitude = bits & (0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF)
    finite = real & (magnitude < TOP)
    nonzero = finite & (magnitude > 0)
    special = tl.where(magnitude > TOP, 1, tl.where(bits > 0, 1 << 10, 1 << 20))  # no row has more than 128
    special = _counts(tl.where(real & (magnitude >= TOP), special, 0))
    edge = tl.where(magnitude == 0, 1, tl.where(magnitude < SMALLEST, 1 << 10, 0)) + tl.where(
        magnitude == LARGEST, 1 << 20, 0
    )
    edge = _counts(tl.where(real, edge, 0))
    add(ints + _NAN, special & 0xFFFFF)
    add(ints + _POS_INF, (special >> 20) & 0xFFFFF)
    add(ints + _NEG_INF, special >> 40)
    add(ints + _HIST, edge & 0xFFFFF)
    add(ints + _SUBNORMAL, (edge >> 20) & 0xFFFFF)
    add(ints + _AT_MAX, edge >> 40)
    highest = tl.max(tl.max(tl.where(finite, magnitude, 0), axis=1), axis=0)
    lowest = tl.min(tl.min(tl.where(nonzero, magnitude, TOP), axis=1), axis=0)
    merge_extremes(floats, highest, lowest, WIDE)
    _add_sums(floats, tl.where(finite, bits, 0), highest, WIDE)
    keys = tl.where(nonzero, entry_of(magnitude, 52 if WIDE else 23), 0)
    count_keys(keys, ints + _HIST, 1, N)
    if BLOCKS & 1:
        _count_blocks(keys, real, ints + _BLOCK16, 16, N, W)
    if BLOCKS & 2:
        _count_blocks(keys, real, ints + _BLOCK32, 32, N, W)
    if BLOCKS & 4:
        _count_blocks(keys, real, ints + _BLOCK128, 128, N, W)
    return (special & 0xFFFFF) + ((special >> 20) & 0xFFFFF) + (special >> 40)
