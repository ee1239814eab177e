"""Fast counting of tiles of ordinary values: no barrier, no atomic and no reduction across lanes per tile.

A program iterates over tiles of 128 lanes, 16 bytes per lane (8 for FP8). The binades that occur in a tensor lie close
together, so they are counted in a window of 31 neighbours whose top comes from the data: every element is a one in a
4-bit field of two words. A 32nd field counts the zeros and everything else outside of the window. If that field counts
more than a lane's zeros, or the lane's largest magnitude is at the format's maximum or beyond, the lane does not count
its elements and raises a flag for that tile. After every 31 tiles the fields, by then of 8 bits, are added up across
the lanes into the slot, and elements of flagged lanes are read again and counted by ``triton_tile.tally``.

With block histograms, a flag excludes the 128 elements of a largest block. Padding is read as zero and counted as zero;
the program that signs the slot subtracts it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precdoctor.numerics import EXP_MIN
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.triton_tile import add, as_fp32_bits, fingerprint_terms, merge_extremes, tally

#: Tiles between two additions to the slot: a field of 8 bits holds eight elements of each.
TILES = tl.constexpr(31)
#: Lanes of a program.
LANES = tl.constexpr(128)

_SUBNORMAL, _FINGERPRINT = tl.constexpr(at.SUBNORMAL), tl.constexpr(at.FINGERPRINT)
_HIST = tl.constexpr(at.HIST)
_BLOCK16, _BLOCK32, _BLOCK128 = (tl.constexpr(at.block_hist(size)) for size in at.BLOCK_SIZES)
_TO_PEAKS = tl.constexpr(at.BLOCK_WIDTH)
#: Offset from the exponent field of an FP32 number just below a magnitude to its entry in a histogram.
_TO_ENTRY = tl.constexpr(1 - 127 - EXP_MIN)
#: Binades kept free above the largest magnitude of the tile that determines the window.
_ABOVE = tl.constexpr(4)
# Range of the window's highest binade, as an exponent field. Below it, a zero could be taken for a number.
_LOWEST_TOP, _HIGHEST_TOP = tl.constexpr(62), tl.constexpr(254)
OUTSIDE = tl.constexpr(124)  # four times the index of the field for zeros
_NIBBLES = tl.constexpr(0x0F0F0F0F0F0F0F0F)
_BYTES = tl.constexpr(0x00FF00FF00FF00FF)
_TOP = tl.constexpr(0x7F800000)


@triton.jit
def one_at(distance):
    """Return each distance (times four, at most 124) as a one in a 4-bit field of two words."""
    low = distance < 64
    one = tl.full(distance.shape, 1, tl.int64) << (distance & 63).to(tl.int64)
    return tl.where(low, one, 0), tl.where(low, 0, one)


@triton.jit
def widened(low, high, w0, w1, w2, w3):
    """Add fields of 4 bits to fields of 8."""
    w0 += low & _NIBBLES
    w1 += (low >> 4) & _NIBBLES
    w2 += high & _NIBBLES
    w3 += (high >> 4) & _NIBBLES
    return w0, w1, w2, w3


@triton.jit
def kept(rare, counted):
    """Return ``counted``, with 0 for the lanes that are left out."""
    return tl.where(rare, 0, counted)


@triton.jit
def totals(w0, w1, w2, w3):
    """Return how often each distance, 0 to 31, occurred over all lanes; int64."""
    a0, b0 = tl.sum(w0 & _BYTES), tl.sum((w0 >> 8) & _BYTES)
    a1, b1 = tl.sum(w1 & _BYTES), tl.sum((w1 >> 8) & _BYTES)
    a2, b2 = tl.sum(w2 & _BYTES), tl.sum((w2 >> 8) & _BYTES)
    a3, b3 = tl.sum(w3 & _BYTES), tl.sum((w3 >> 8) & _BYTES)
    n = tl.arange(0, 32)
    odd, second = n % 2 == 1, n // 2 % 2 == 1
    lower = tl.where(odd, tl.where(second, b1, a1), tl.where(second, b0, a0))
    upper = tl.where(odd, tl.where(second, b3, a3), tl.where(second, b2, a2))
    return (tl.where(n < 16, lower, upper) >> (n // 4 % 4 * 16).to(tl.int64)) & 0xFFFF


@triton.jit
def settle_values(w0, w1, w2, w3, hist, top):
    """Add a window over magnitudes to a histogram whose entry 0 counts zeros."""
    n = tl.arange(0, 32)
    add(hist + tl.where(n < 31, top - n + _TO_ENTRY, 0), totals(w0, w1, w2, w3))


@triton.jit
def _distances(binade, spread):
    """Count a lane's elements by distance to their block's peak, in fields; exponent fields are times four."""
    low, high = one_at(tl.minimum((spread - binade).to(tl.uint32, bitcast=True), OUTSIDE))
    return tl.sum(low, axis=4), tl.sum(high, axis=4)


@triton.jit
def _spread(peak):
    """Return the binade that distances count from: the block's peak, or, if it is all zero, one that excludes zeros."""
    return tl.where(peak < 0, 4096, peak)


@triton.jit
def _is_outside(binade, spread, zeros):
    """Whether an element of a lane is neither zero nor less than 31 binades below its block's peak."""
    _, high = _distances(binade, spread)
    return ((high >> 60) & 15).to(tl.int32) != zeros


@triton.jit
def _groups_left_out(binade, of16, of32, of128, zeros, rare, WANT: tl.constexpr):
    """Find groups of 128 elements with a rare lane, or with an element too far below its block's peak.

    Returns a mask of the lanes in such groups, and for each group the bits to keep: none or all.
    """
    if WANT & 1:
        rare = rare | _is_outside(binade, of16, zeros)
    if WANT & 2:
        rare = rare | _is_outside(binade, of32, zeros)
    if WANT & 4:
        rare = rare | _is_outside(binade, of128, zeros)
    out = tl.max(tl.max(tl.max(rare.to(tl.int32), axis=0), axis=0), axis=0)
    return (out[None, None, None, :] + zeros * 0) != 0, tl.where(out != 0, 0, -1).to(tl.int64)


@triton.jit
def _with_blocks(binade, peak, spread, top4, rare, keep, x0, x1, x2, x3, p0, p1, p2, p3):
    """Count one block size of one tile: elements by distance, blocks by peak, without the lanes and blocks left out."""
    low, high = _distances(binade, spread)
    x0, x1, x2, x3 = widened(kept(rare, low), kept(rare, high), x0, x1, x2, x3)
    low, high = one_at(tl.minimum((top4 - peak).to(tl.uint32, bitcast=True), OUTSIDE))
    p0, p1, p2, p3 = widened(low & keep, high & keep, p0, p1, p2, p3)
    return x0, x1, x2, x3, p0, p1, p2, p3


@triton.jit
def _settle_blocks(x0, x1, x2, x3, p0, p1, p2, p3, row, top, WANTED: tl.constexpr):
    if WANTED:
        n = tl.arange(0, 32)
        add(row + n, tl.where(n < 31, totals(x0, x1, x2, x3), 0))
        settle_values(p0, p1, p2, p3, row + _TO_PEAKS, top)


@triton.jit
def _lanes(G: tl.constexpr, B: tl.constexpr):
    """Indices of a tile's lanes, in shape [B, 2, 4, G]: G blocks of 128, each four of 32, each two of 16, each B lanes.

    Triton gives neighbours along the first of equal dimensions to neighbouring threads.
    """
    of_16 = tl.arange(0, 2)[None, :, None, None] * B
    of_32 = tl.arange(0, 4)[None, None, :, None] * (2 * B)
    of_128 = tl.arange(0, G)[None, None, None, :] * (8 * B)
    return tl.arange(0, B)[:, None, None, None] + of_16 + of_32 + of_128


@triton.jit
def _load(
    x, piece, numel, columns, column_stride, groups, size1, size2, stride0, stride1, stride2,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Load E elements per lane, shape [B, 2, 4, G, E]; return them, their logical indices, and which are not padding.

    ``FLAT``: memory is read from end to end. Otherwise rows are, in ``groups`` of UNIT elements each, the last of which
    may be padded. ``ALIGNED``: a lane's elements are adjacent, and all present or all padding.
    """
    lanes = _lanes(G, B)[:, :, :, :, None]
    e = tl.arange(0, E)[None, None, None, None, :]
    if FLAT:
        start = (tl.zeros([], tl.int64) + piece) * (LANES * E)
        left = tl.minimum(numel - start, LANES * E).to(tl.int32)
        offset = lanes * E + e
        real = (lanes * E < left) & (e >= 0) if ALIGNED else offset < left
        return tl.load(x + start + offset, mask=real, other=0), start.to(tl.int32) + offset, real
    if ALIGNED:  # written so that Triton infers that these are multiples of 16 and neighbours are adjacent
        stride0, stride1, stride2 = stride0 // 16 * 16, stride1 // 16 * 16, stride2 // 16 * 16
        column_stride = 1
    unit = piece * LANES + lanes
    group = unit // (UNIT // E)
    row = group // groups
    column = group % groups * UNIT + unit % (UNIT // E) * E
    there = row < (numel // columns).to(tl.int32)
    real = there & (column < columns) & (e >= 0) if ALIGNED else there & (column + e < columns)
    offset = (row // (size1 * size2)).to(tl.int64) * stride0 + (row // size2 % size1).to(tl.int64) * stride1
    offset += (row % size2).to(tl.int64) * stride2
    loaded = tl.load(x + offset + (column + e).to(tl.int64) * column_stride, mask=real, other=0)
    return loaded, row * columns.to(tl.int32) + column + e, real


@triton.jit
def chosen_top(bits, before):
    """Return the exponent field at a window's top: from a tile's largest finite magnitude, or else an earlier one."""
    magnitude = bits & 0x7FFFFFFF
    here = tl.max(tl.where(magnitude < _TOP, magnitude, 0))
    largest = tl.where(here > 0, here, before)
    return tl.minimum(tl.maximum(((largest - 1) >> 23) + _ABOVE, _LOWEST_TOP), _HIGHEST_TOP)


@triton.jit
def either(a, b):
    """Return the bits of both, for reductions."""
    return a | b


@triton.jit
def scale_of(top):
    """Return the power of two that scales a window's largest magnitudes to at most 4, so that squares stay in range."""
    return ((254 - tl.minimum(top, 253)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def classified(bits, top4, LARGEST: tl.constexpr, AXIS: tl.constexpr):
    """Classify a tile's elements; a lane's elements lie along AXIS.

    Returns, per element, the exponent field of the number just below its magnitude, times four (-4: zero). Per lane:
    the number of elements at each distance from the window's top, in 4-bit fields of two words; the number of zeros;
    the largest magnitude; and whether an element is rare: neither zero nor in the window, or at the format's maximum.
    """
    magnitude = bits & 0x7FFFFFFF
    below = magnitude - 1
    binade = (below >> 21) & -4
    low, high = one_at(tl.minimum((top4 - binade).to(tl.uint32, bitcast=True), OUTSIDE))
    low, high = tl.sum(low, axis=AXIS), tl.sum(high, axis=AXIS)
    zeros = -tl.sum(below >> 31, axis=AXIS)
    largest = tl.max(magnitude, axis=AXIS)
    rare = (((high >> 60) & 15).to(tl.int32) != zeros) | (largest >= LARGEST)
    return binade, low, high, zeros, largest, rare


@triton.jit
def merged(bits, rare, largest, scale, amax, amin, part, part_squares, AXIS: tl.constexpr):
    """Merge a tile's extremes and sums into those of the lanes; ``amin`` holds magnitudes less one."""
    amax = tl.maximum(amax, kept(rare, largest))
    smallest = tl.min(((bits & 0x7FFFFFFF) - 1).to(tl.uint32, bitcast=True), axis=AXIS)
    amin = tl.minimum(amin, tl.where(rare, 0xFFFFFFFF, smallest))
    value = bits.to(tl.float32, bitcast=True) * scale
    part += tl.where(rare, 0.0, tl.sum(value, axis=AXIS))
    part_squares += tl.where(rare, 0.0, tl.sum(value * value, axis=AXIS))
    return amax, amin, part, part_squares


@triton.jit
def _tiny(bits, SMALLEST: tl.constexpr):
    """Count a lane's elements that are subnormal in their format."""
    below = ((bits & 0x7FFFFFFF) - 1).to(tl.uint32, bitcast=True)
    return tl.sum((below < SMALLEST - 1).to(tl.int32), axis=4)


@triton.jit
def settle_sums(floats, part, part_squares, top):
    """Add the lanes' sums, and sums of squares, of scaled elements to the slot."""
    up = ((tl.minimum(top, 253)) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    tl.atomic_add(floats + 2, tl.sum(part).to(tl.float64) * up, sem="relaxed")
    tl.atomic_add(floats + 3, tl.sum(part_squares).to(tl.float64) * up * up, sem="relaxed")


@triton.jit
def settle_extremes(floats, amax, amin):
    """Merge the largest and the smallest non-zero magnitude over all lanes into the slot."""
    least = tl.min(amin)
    least = tl.where(least == 0xFFFFFFFF, _TOP, (least + 1).to(tl.int32, bitcast=True))
    merge_extremes(floats, tl.max(amax), least, False)


@triton.jit
def _measure_chunk(
    x, ints, floats, start, end, step, numel, columns, column_stride, groups,
    size1, size2, stride0, stride1, stride2, fingerprint, amax, amin, tiny,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Count as many tiles as 8-bit fields can hold. Returns running results, and per lane flags of tiles left out."""
    loaded, index, real = _load(
        x, start, numel, columns, column_stride, groups, size1, size2, stride0, stride1, stride2,
        FLAT, ALIGNED, UNIT, G, B, E,
    )  # fmt: skip
    top = chosen_top(as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE), tl.max(amax))
    top4, scale = top * 4, scale_of(top)
    none = tl.zeros([B, 2, 4, G], tl.int64)
    flags, flag = none.to(tl.int32), tl.full([], 1, tl.int32)
    part, part_squares = none.to(tl.float32), none.to(tl.float32)
    w0, w1, w2, w3 = none, none, none, none
    x0, x1, x2, x3 = none, none, none, none  # distances in blocks of 16, of 32, of 128; then their peaks
    y0, y1, y2, y3 = none, none, none, none
    z0, z1, z2, z3 = none, none, none, none
    none = tl.max(none, axis=0)
    p0, p1, p2, p3 = none, none, none, none
    none = tl.max(none, axis=0)
    q0, q1, q2, q3 = none, none, none, none
    none = tl.max(none, axis=0)
    r0, r1, r2, r3 = none, none, none, none
    for tile in range(start, end, step):
        bits = as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE)
        if WANT & 8:
            fingerprint += tl.sum(tl.where(real, fingerprint_terms(loaded, index, SIZE), 0), axis=4)
        loaded, index, real = _load(  # the next tile, loaded while this one is counted
            x, tile + step, numel, columns, column_stride, groups, size1, size2, stride0, stride1, stride2,
            FLAT, ALIGNED, UNIT, G, B, E,
        )  # fmt: skip
        binade, low, high, zeros, largest, rare = classified(bits, top4, LARGEST, 4)
        if WANT & 7:
            peak16 = tl.max(((largest - 1) >> 21) & -4, axis=0)
            peak32 = tl.max(peak16, axis=0)
            peak128 = tl.max(peak32, axis=0)
            of16, of32 = _spread(peak16)[None, :, :, :, None], _spread(peak32)[None, None, :, :, None]
            of128 = _spread(peak128)[None, None, None, :, None]
            rare, keep = _groups_left_out(binade, of16, of32, of128, zeros, rare, WANT)
            if WANT & 1:
                x0, x1, x2, x3, p0, p1, p2, p3 = _with_blocks(
                    binade, peak16, of16, top4, rare, keep[None, None, :], x0, x1, x2, x3, p0, p1, p2, p3
                )
            if WANT & 2:
                y0, y1, y2, y3, q0, q1, q2, q3 = _with_blocks(
                    binade, peak32, of32, top4, rare, keep[None, :], y0, y1, y2, y3, q0, q1, q2, q3
                )
            if WANT & 4:
                z0, z1, z2, z3, r0, r1, r2, r3 = _with_blocks(
                    binade, peak128, of128, top4, rare, keep, z0, z1, z2, z3, r0, r1, r2, r3
                )
        w0, w1, w2, w3 = widened(kept(rare, low), kept(rare, high), w0, w1, w2, w3)
        amax, amin, part, part_squares = merged(bits, rare, largest, scale, amax, amin, part, part_squares, 4)
        if SIZE < 4 and BIAS != 127:  # the format's subnormals are normal numbers of FP32
            tiny += kept(rare, _tiny(bits, SMALLEST))
        flags, flag = flags | tl.where(rare, flag, 0), flag << 1
    settle_values(w0, w1, w2, w3, ints + _HIST, top)
    settle_sums(floats, part, part_squares, top)
    _settle_blocks(x0, x1, x2, x3, p0, p1, p2, p3, ints + _BLOCK16, top, WANT & 1)
    _settle_blocks(y0, y1, y2, y3, q0, q1, q2, q3, ints + _BLOCK32, top, WANT & 2)
    _settle_blocks(z0, z1, z2, z3, r0, r1, r2, r3, ints + _BLOCK128, top, WANT & 4)
    return fingerprint, amax, amin, tiny, flags


@triton.jit
def _measure_left_out(
    x, ints, floats, start, step, flags, numel, columns, column_stride, groups,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Count the elements of flagged lanes, tile by tile. Returns the number of non-finite elements."""
    N: tl.constexpr = LANES * E
    bad = tl.zeros([], tl.int64)
    again = tl.reduce(tl.reshape(flags, [LANES]), 0, either)
    tile = start
    while again != 0:
        if again & 1:
            loaded, _, _ = _load(
                x, tile, numel, columns, column_stride, groups, size1, size2, stride0, stride1, stride2,
                FLAT, ALIGNED, UNIT, G, B, E,
            )  # fmt: skip
            bits = tl.permute(as_fp32_bits(loaded, MBITS, BIAS, SPECIAL, FNUZ, SIZE), (3, 2, 1, 0, 4))
            mine = ((flags & 1) != 0)[:, :, :, :, None] & (tl.arange(0, E) >= 0)[None, None, None, None, :]
            mine = tl.reshape(tl.permute(mine, (3, 2, 1, 0, 4)), [N // 128, 128])
            bad += tally(
                tl.reshape(bits, [N // 128, 128]), mine, ints, floats, SMALLEST, LARGEST, WANT & 7, N, 128, False
            )
        flags = flags >> 1
        again = again >> 1
        tile += step
    return bad


@triton.jit
def measure_window(
    x, ints, floats, first, stop, step, numel, columns, column_stride, groups,
    size1, size2, stride0, stride1, stride2,
    MBITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, FNUZ: tl.constexpr, SIZE: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, WANT: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count one program's tiles of a tensor of at most 32 bits. Returns the number of non-finite elements."""
    E: tl.constexpr = 4 if SIZE == 4 else 8
    B: tl.constexpr = 16 // E
    G: tl.constexpr = LANES // (8 * B)
    UNIT: tl.constexpr = 128 if WANT & 7 else E
    fingerprint = tl.zeros([B, 2, 4, G], tl.int64)
    amax = fingerprint.to(tl.int32)
    amin = tl.full([B, 2, 4, G], 0xFFFFFFFF, tl.uint32)  # magnitudes less one, so that a zero is the largest
    tiny = amax
    bad = tl.zeros([], tl.int64)
    for start in range(first, stop, step * TILES):
        end = tl.minimum(start + step * TILES, stop)
        fingerprint, amax, amin, tiny, flags = _measure_chunk(
            x, ints, floats, start, end, step, numel, columns, column_stride, groups,
            size1, size2, stride0, stride1, stride2, fingerprint, amax, amin, tiny,
            MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, FLAT, ALIGNED, UNIT, G, B, E,
        )  # fmt: skip
        bad += _measure_left_out(
            x, ints, floats, start, step, flags, numel, columns, column_stride, groups,
            size1, size2, stride0, stride1, stride2,
            MBITS, BIAS, SPECIAL, FNUZ, SIZE, SMALLEST, LARGEST, WANT, FLAT, ALIGNED, UNIT, G, B, E,
        )  # fmt: skip
    settle_extremes(floats, amax, amin)
    if SIZE < 4 and BIAS != 127:
        add(ints + _SUBNORMAL, tl.sum(tiny).to(tl.int64))
    if WANT & 8:
        tl.atomic_add(ints + _FINGERPRINT, tl.sum(fingerprint), sem="relaxed")
    return bad
