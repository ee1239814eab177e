"""Updates on CUDA: the stored update, and how much of the intended one was lost; counted in windows like values.

Besides the window over the differences there is one over the binades between an intended update and its weight. Its
32nd field counts the elements without such a distance (no intended update, a weight of zero, a non-finite number);
subnormal weights and intended updates, and distances outside of the window, raise the lane's flag.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.triton_tile import add, as_fp32_bits, count_keys, entry_of, tally
from precdoctor.recording.kernels.triton_window import (
    LANES,
    OUTSIDE,
    TILES,
    chosen_top,
    classified,
    either,
    kept,
    merged,
    one_at,
    scale_of,
    settle_extremes,
    settle_sums,
    settle_values,
    totals,
    widened,
)

_HIST, _REL, _UNCHANGED = tl.constexpr(at.HIST), tl.constexpr(at.REL), tl.constexpr(at.UNCHANGED)
_REL_MIN, _REL_MAX = tl.constexpr(at.REL_MIN), tl.constexpr(at.REL_MAX)
_E = tl.constexpr(4)  # elements of a lane
_ABOVE = tl.constexpr(4)
_TOP = tl.constexpr(0x7F800000)


@triton.jit
def _load(
    before, after, intended, tile, numel,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    INTENDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load bits of the difference, magnitudes of weight and intended update, and whether nothing changed.

    All have the shape [LANES, E].
    """
    start = (tl.zeros([], tl.int64) + tile) * (LANES * _E)
    left = tl.minimum(numel - start, LANES * _E).to(tl.int32)
    lane, e = tl.arange(0, LANES)[:, None] * _E, tl.arange(0, _E)[None, :]
    real = (lane < left) & (e >= 0) if ALIGNED else lane + e < left
    old = tl.load(before + start + (lane + e), mask=real, other=0)
    new = tl.load(after + start + (lane + e), mask=real, other=0)
    step = tl.load(intended + start + (lane + e), mask=real, other=0)
    weight = as_fp32_bits(old, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
    stored = as_fp32_bits(new, MBITS, BIAS, SPECIAL, FNUZ, SIZE).to(tl.float32, bitcast=True)
    change = (stored - weight.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return change, weight & 0x7FFFFFFF, step & (0x7FFFFFFF if INTENDED == 4 else 0x7FFFFFFFFFFFFFFF), old == new


@triton.jit
def _tally(
    change, weight, step, same, flagged, ints, floats,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr,
):  # fmt: skip
    """Count a tile exhaustively. Returns the number of non-finite differences."""
    N: tl.constexpr = LANES * _E
    wanted = flagged & (step > 0) & (step < (0x7F800000 if INTENDED == 4 else 0x7FF << 52))
    add(ints + _UNCHANGED, tl.sum(tl.sum((wanted & same).to(tl.int32), axis=1), axis=0).to(tl.int64))
    relative = entry_of(step, 23 if INTENDED == 4 else 52) - entry_of(weight, 23)
    relative = tl.minimum(tl.maximum(relative, _REL_MIN), _REL_MAX) - _REL_MIN
    count_keys(tl.where(wanted & (weight > 0) & (weight < _TOP), relative + 1, 0), ints + _REL - 1, 1, N)
    return tally(
        tl.reshape(change, [N // 128, 128]), tl.reshape(flagged, [N // 128, 128]), ints, floats,
        SMALLEST, LARGEST, 0, N, 128, False,
    )  # fmt: skip


@triton.jit
def _is_normal(magnitude):
    """Whether FP32 magnitude bits are those of a finite number above the smallest normal one."""
    return (magnitude - 0x800001).to(tl.uint32, bitcast=True) < 0x7F800000 - 0x800001


@triton.jit
def _is_tiny(magnitude):
    """Whether FP32 magnitude bits are those of a subnormal or the smallest normal number."""
    return (magnitude - 1).to(tl.uint32, bitcast=True) < 0x800000


@triton.jit
def _chosen_highest(step, weight):
    """Return the top of a window over the binades of an intended update above its weight."""
    apart = ((step - 1) >> 23) - ((weight - 1) >> 23)
    highest = tl.max(tl.where(_is_normal(step) & _is_normal(weight), apart, _REL_MIN)) + _ABOVE
    return tl.minimum(tl.maximum(highest, _REL_MIN + 30), _REL_MAX)


@triton.jit
def _measure_left_out(
    before, after, intended, ints, floats, tile, flags, numel,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count the elements of flagged lanes, tile by tile. Returns the number of non-finite differences."""
    bad = tl.zeros([], tl.int64)
    again = tl.reduce(flags, 0, either)
    while again != 0:
        if again & 1:
            change, weight, step, same = _load(
                before, after, intended, tile, numel, MBITS, BIAS, SPECIAL, FNUZ, SIZE, INTENDED, ALIGNED
            )
            flagged = ((flags & 1) != 0)[:, None] & (weight >= 0)
            bad += _tally(change, weight, step, same, flagged, ints, floats, SMALLEST, LARGEST, INTENDED)
        flags = flags >> 1
        again = again >> 1
        tile += 1
    return bad


@triton.jit
def _measure_window(
    before, after, intended, ints, floats, first, stop, numel,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count one program's tiles in windows, then flagged lanes. Returns the number of non-finite differences."""
    none = tl.zeros([LANES], tl.int64)
    amax = tl.zeros([LANES], tl.int32)
    amin = tl.full([LANES], 0xFFFFFFFF, tl.uint32)  # magnitudes less one, so that a zero is the largest
    bad = tl.zeros([], tl.int64)
    unchanged = tl.zeros([LANES], tl.int32)
    for start in range(first, stop, TILES):
        end = tl.minimum(start + TILES, stop)
        change, weight, step, same = _load(
            before, after, intended, start, numel, MBITS, BIAS, SPECIAL, FNUZ, SIZE, INTENDED, ALIGNED
        )
        top = chosen_top(change, tl.max(amax))
        top4 = top * 4
        scale = scale_of(top)
        highest = _chosen_highest(step, weight)
        flags = tl.zeros([LANES], tl.int32)
        flag = tl.full([], 1, tl.int32)
        part = tl.zeros([LANES], tl.float32)
        part_squares = part
        w0, w1, w2, w3 = none, none, none, none
        r0, r1, r2, r3 = none, none, none, none
        for tile in range(start, end, 1):
            bits, old, new, kept_as_it_was = change, weight, step, same
            change, weight, step, same = _load(  # the next tile, loaded while this one is counted
                before, after, intended, tile + 1, numel, MBITS, BIAS, SPECIAL, FNUZ, SIZE, INTENDED, ALIGNED
            )
            _, low, high, _, largest, rare = classified(bits, top4, LARGEST, 1)
            counted = _is_normal(new) & _is_normal(old)
            distance = (highest * 4 - (((new - 1) >> 21) & -4) + (((old - 1) >> 21) & -4)).to(tl.uint32, bitcast=True)
            r_low, r_high = one_at(tl.where(counted, tl.minimum(distance, OUTSIDE), OUTSIDE))
            r_low, r_high = tl.sum(r_low, axis=1), tl.sum(r_high, axis=1)
            without = _E - tl.sum(counted.to(tl.int32), axis=1)
            rare = rare | (((r_high >> 60) & 15).to(tl.int32) != without)
            rare = rare | (tl.sum((_is_tiny(new) | _is_tiny(old)).to(tl.int32), axis=1) != 0)
            wanted = (new - 1).to(tl.uint32, bitcast=True) < 0x7F800000 - 1
            unchanged += kept(rare, tl.sum((wanted & kept_as_it_was).to(tl.int32), axis=1))
            w0, w1, w2, w3 = widened(kept(rare, low), kept(rare, high), w0, w1, w2, w3)
            r0, r1, r2, r3 = widened(kept(rare, r_low), kept(rare, r_high), r0, r1, r2, r3)
            amax, amin, part, part_squares = merged(bits, rare, largest, scale, amax, amin, part, part_squares, 1)
            flags |= tl.where(rare, flag, 0)
            flag = flag << 1
        settle_values(w0, w1, w2, w3, ints + _HIST, top)
        n = tl.arange(0, 32)
        add(ints + _REL + (highest - n - _REL_MIN), tl.where(n < 31, totals(r0, r1, r2, r3), 0))
        settle_sums(floats, part, part_squares, top)
        bad += _measure_left_out(
            before, after, intended, ints, floats, start, flags, numel,
            MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, INTENDED, ALIGNED,
        )  # fmt: skip
    add(ints + _UNCHANGED, tl.sum(unchanged, axis=0).to(tl.int64))
    settle_extremes(floats, amax, amin)
    return bad


@triton.jit
def measure_update(
    before, after, intended, ints, floats, first, stop, numel,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, INTENDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count one program's tiles, as ``reference.measure_update`` does, for tensors with the same layout in memory.

    ``INTENDED``: bytes per element of the intended update; with 8 it is counted exhaustively. ``SMALLEST`` and
    ``LARGEST`` are those of FP32, the format of the difference. Returns the number of non-finite differences.
    """
    if INTENDED == 8:
        bad = tl.zeros([], tl.int64)
        for tile in range(first, stop, 1):
            change, weight, step, same = _load(
                before, after, intended, tile, numel, MBITS, BIAS, SPECIAL, FNUZ, SIZE, INTENDED, ALIGNED
            )
            bad += _tally(change, weight, step, same, weight >= 0, ints, floats, SMALLEST, LARGEST, INTENDED)
    else:
        bad = _measure_window(
            before, after, intended, ints, floats, first, stop, numel,
            MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, INTENDED, ALIGNED,
        )  # fmt: skip
    return bad
