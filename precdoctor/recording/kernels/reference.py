"""The reference kernel: every statistic of a tensor in plain torch ops, on any device, one cache-sized chunk at a time.

It is written to be correct and to be read beside docs/run-log.md; the fast kernels are tested against it. Each element
is widened to float64 first, in which the values of every narrower type are exact and normal. So one code path serves
FP64 down to FP8, and classifying by bit patterns needs no special case for subnormals.

Nothing here waits for a device: results are accumulated where the tensor lives. The shortcuts marked ``if host`` read
intermediate results, which is free on the CPU and would be a synchronisation elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from precdoctor.numerics import EXP_MAX, EXP_MIN
from precdoctor.recording.kernels import row_layout as at

#: Elements per chunk: on a CPU the temporaries should stay in a core's L2 cache; a GPU needs long launches.
CHUNK_CPU = 32 * 1024
CHUNK_DEVICE = 1024 * 1024

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAGNITUDE = 0x7FFF_FFFF_FFFF_FFFF
_TOP = 1 + EXP_MAX - EXP_MIN  # key of the last bin; NaN and Inf fall there too and are subtracted again


def chunks(x: Tensor, limit: int) -> Iterator[tuple[int, Tensor]]:
    """Yield ``x`` in logical order as contiguous pieces of whole rows, or of parts of one row cut at multiples of 128.

    Args:
        x: any strides; at least one element.
        limit: maximum number of elements of a piece.

    Yields:
        The logical index of the piece's first element, and the piece, shape ``(rows, columns)``. Nothing larger than
        ``limit`` elements is ever copied.
    """
    if x.dim() == 0:
        yield 0, x.reshape(1, 1)
        return
    if x.dim() == 1 or (x.is_contiguous() and x.shape[-1] > limit):
        row_length = x.shape[-1]
        step = max(128, limit // 128 * 128)
        for r, row in enumerate(x.reshape(-1, row_length) if x.dim() > 1 else x[None]):
            for start in range(0, row_length, step):
                yield r * row_length + start, row[start : start + step].contiguous()[None]
        return
    inner = math.prod(x.shape[1:])
    if x.is_contiguous() or inner <= limit:
        rows = x.reshape(-1, x.shape[-1]) if x.is_contiguous() else x
        per_row = rows[0].numel()
        count = max(1, limit // per_row)
        for start in range(0, rows.shape[0], count):
            yield start * per_row, rows[start : start + count].reshape(-1, x.shape[-1]).contiguous()
        return
    for i in range(x.shape[0]):
        for start, piece in chunks(x[i], limit):
            yield i * inner + start, piece


def measure(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> None:
    """Accumulate the statistics of ``x`` into one slot.

    Args:
        x: floating-point, any shape but empty, any strides.
        ints: int64, shape ``(INT_WIDTH,)``, on the device of ``x``.
        floats: float64, shape ``(FLOAT_WIDTH,)``.
        counter: int64 scalar, the device's launch counter; advanced by one.
        blocks: block sizes to histogram, out of 16, 32, 128 (blocks run along the last dimension).
    """
    counter += 1
    bad = torch.zeros((), dtype=torch.int64, device=x.device)
    seed_fingerprint(x, ints)
    for start, piece in chunks(x, CHUNK_CPU if x.is_cpu else CHUNK_DEVICE):
        bad += measure_piece(piece, start, ints, floats, blocks)
    finish(x, ints, counter, bad)


def measure_piece(piece: Tensor, start: int, ints: Tensor, floats: Tensor, blocks: Sequence[int]) -> Tensor:
    """Accumulate one contiguous piece, shape ``(rows, columns)``, whose first element has logical index ``start``.

    Returns the number of its elements that are NaN or Inf, on the device.
    """
    host = piece.is_cpu
    wide = piece.to(torch.float64, copy=True)
    key, bad = _accumulate_values(wide, ints, floats, host)
    _accumulate_format_edges(wide, ints, torch.finfo(piece.dtype), host)
    for block in blocks:
        _accumulate_blocks(key, ints, block)
    ints[at.FINGERPRINT] += fingerprint(piece, start)
    return bad


def finish(x: Tensor, ints: Tensor, counter: Tensor, bad: Tensor) -> None:
    """Write the columns of the launch as a whole; ``bad`` is the number of NaN and Inf in the tensor."""
    ints[at.NUMEL] += x.numel()
    ints[at.LAUNCHES] += 1
    torch.minimum(ints[at.ORDER], counter, out=ints[at.ORDER])
    first_bad = torch.where(bad > 0, counter, at.NEVER)
    torch.minimum(ints[at.FIRST_BAD_ORDER], first_bad, out=ints[at.FIRST_BAD_ORDER])


def exponent_key(wide: Tensor) -> Tensor:
    """Histogram entry of each element: 0 for zero, ``1 + k - EXP_MIN`` for magnitudes in ``(2**k, 2**(k+1)]``.

    The exponent field of the float64 just below ``|x|`` is that k plus the bias. Subtracting 1 from the bit pattern
    gives this float64, and turns the pattern of zero into -1, whose field is below every bin. Inf and NaN get the last
    entry.
    """
    bits = wide.view(torch.int64) & _MAGNITUDE
    bits -= 1
    bits >>= 52
    bits += 1 - 1023 - EXP_MIN
    is_nonzero = bits > -1023 - EXP_MIN  # zero's field is -1, one below the lowest
    return bits.clamp_(1, _TOP).mul_(is_nonzero)


def count_into(hist: Tensor, keys: Tensor) -> None:
    """Add the number of occurrences of each key to ``hist`` (int64, shape ``(bins,)``), without a synchronisation."""
    if keys.is_cpu:
        hist += torch.bincount(keys.flatten(), minlength=hist.numel())
    else:  # on CUDA, bincount reads the maximum back to the host
        flat = keys.flatten()
        hist.scatter_add_(0, flat, torch.ones_like(flat))


def _accumulate_values(wide: Tensor, ints: Tensor, floats: Tensor, host: bool) -> tuple[Tensor, Tensor]:
    """Accumulate histogram, NaN/Inf counts, amax, amin and sums of one piece; zeroes non-finite elements of ``wide``.

    Returns the exponent keys, 0 for non-finite elements, and the number of non-finite elements.
    """
    bad = torch.zeros((), dtype=torch.int64, device=wide.device)
    key = exponent_key(wide)
    count_into(ints[at.HIST : at.HIST + at.HIST_WIDTH], key)
    if not host or bool((key == _TOP).any()):
        nan, pos, neg = wide.isnan(), wide == math.inf, wide == -math.inf
        for column, mask in ((at.NAN, nan), (at.POS_INF, pos), (at.NEG_INF, neg)):
            count = mask.sum()
            ints[column] += count
            ints[at.HIST + _TOP] -= count
            bad += count
        non_finite = nan | pos | neg
        wide.masked_fill_(non_finite, 0.0)
        key.masked_fill_(non_finite, 0)
    magnitude = wide.abs()
    torch.maximum(floats[at.AMAX], magnitude.max(), out=floats[at.AMAX])
    smallest = magnitude.masked_fill_(magnitude == 0, math.inf).min()
    torch.minimum(floats[at.AMIN], smallest, out=floats[at.AMIN])
    floats[at.SUM] += wide.sum()
    floats[at.SUM_SQ] += wide.square().sum()
    return key, bad


def _accumulate_format_edges(wide: Tensor, ints: Tensor, finfo: torch.finfo, host: bool) -> None:
    """Count subnormals of the tensor's own dtype, and elements at its largest finite value."""
    magnitude = wide.abs()
    if not host or float(magnitude.max()) >= finfo.max:
        ints[at.AT_MAX] += (magnitude == finfo.max).sum()
    ints[at.SUBNORMAL] += ((magnitude < finfo.smallest_normal) & (magnitude > 0)).sum()


def _accumulate_blocks(key: Tensor, ints: Tensor, block: int) -> None:
    """Accumulate block-relative histograms of one piece; a short last block of a row is a block of its own."""
    pad = -key.shape[1] % block
    padded = torch.nn.functional.pad(key, (0, pad)) if pad else key
    grouped = padded.view(key.shape[0], -1, block)
    peak = grouped.amax(dim=-1, keepdim=True)
    below = (peak - grouped).clamp_(max=at.BLOCK_BINS - 1).masked_fill_(grouped == 0, at.BLOCK_BINS)
    first = at.block_hist(block)
    count_into(ints[first : first + at.BLOCK_WIDTH], below)
    first = at.block_amax(block)
    count_into(ints[first : first + at.HIST_WIDTH], peak)


# --- fingerprint -----------------------------------------------------------------------------------------------------
# mix(b, i): a = b + (i + 1) * GOLDEN; a ^= a >> 15; c = a * M; c ^= c >> 13; a * c: the first four on 32 bits without
# sign, the product on 64. i counts 32-bit words in logical order; narrower elements are zero-extended to one word,
# wider ones are two words, low half first. The sum over i does not depend on the order kernels run in. No step can be
# dropped: without the second shift or the factor M, tensors of 1 and -1 with two signs exchanged have equal sums.

GOLDEN = 0x9E3779B1  # 2**32 divided by the golden ratio, odd
_M = 0x85EBCA6B  # first multiplier of MurmurHash3's 32-bit finaliser


def signed32(value: int) -> int:
    """Return ``value`` modulo 2**32 as torch.int32 holds it."""
    value &= 0xFFFF_FFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def signed64(value: int) -> int:
    """Return ``value`` modulo 2**64 as torch.int64 holds it."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def fingerprint(piece: Tensor, start: int) -> Tensor:
    """Sum modulo 2**64 of ``mix(bits, index)`` over one contiguous piece; int64 scalar on its device.

    Args:
        piece: contiguous, any dtype of 1, 2, 4 or 8 bytes.
        start: logical index of its first element.
    """
    size = piece.element_size()
    if size >= 4:
        words = piece.reshape(-1).view(torch.int32)
        start *= size // 4
    else:
        unsigned = 0xFF if size == 1 else 0xFFFF
        words = piece.reshape(-1).view(torch.int8 if size == 1 else torch.int16).to(torch.int32) & unsigned
    index = torch.arange(words.numel(), dtype=torch.int32, device=piece.device)
    a = index.mul_(signed32(GOLDEN)).add_(signed32((start + 1) * GOLDEN)).add_(words)
    return mix_words(a, torch.empty_like(a))


def mix_words(a: Tensor, c: Tensor) -> Tensor:
    """Return the sum of ``mix`` over ``a``, which holds ``b + (i + 1) * GOLDEN``. Overwrites both int32 planes."""
    torch.bitwise_right_shift(a, 15, out=c)
    a ^= c.bitwise_and_(0x1_FFFF)
    torch.mul(a, signed32(_M), out=c)
    c ^= (c >> 13).bitwise_and_(0x7_FFFF)
    low = 0xFFFF_FFFF
    a64, c64 = a.to(torch.int64).bitwise_and_(low), c.to(torch.int64).bitwise_and_(low)
    return torch.dot(a64, c64) if a.is_cpu else (a64 * c64).sum()  # CUDA has no dot product of integers


def fingerprint_seed(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Initial value of a fingerprint, so that equal bits of another dtype or shape differ; 64 bits without sign."""
    seed = 0xCBF29CE484222325  # FNV-1a, 64 bits
    for byte in f"{dtype}{tuple(shape)}".encode():
        seed = ((seed ^ byte) * 0x100000001B3) & 0xFFFF_FFFF_FFFF_FFFF
    return seed


def seed_fingerprint(x: Tensor, ints: Tensor) -> None:
    """Add :func:`fingerprint_seed` to the fingerprint of the slot."""
    ints[at.FINGERPRINT] += signed64(fingerprint_seed(x.dtype, x.shape))


# --- updates ---------------------------------------------------------------------------------------------------------


def measure_update(
    before: Tensor, after: Tensor, intended: Tensor, ints: Tensor, floats: Tensor, counter: Tensor
) -> None:
    """Accumulate the statistics of a stored update, and how much of the intended update was lost.

    Args:
        before: the weight before the step; floating-point, any shape.
        after: the weight after it; same dtype and shape.
        intended: the update that the optimizer computed, before it was added and rounded; same shape, any float dtype.
            Elements that are zero or not finite count as not intended.
        ints, floats, counter: as for :func:`measure`. The difference is taken in FP32 (FP64 for FP64 weights).
    """
    wide = torch.float64 if before.dtype == torch.float64 else torch.float32
    measure(after.to(wide) - before.to(wide), ints, floats, counter, ())
    limit = CHUNK_CPU if before.is_cpu else CHUNK_DEVICE
    for (_, old), (_, new), (_, step) in zip(
        chunks(before, limit), chunks(after, limit), chunks(intended, limit), strict=True
    ):
        _accumulate_lost(old, new, step, ints)


def _accumulate_lost(old: Tensor, new: Tensor, step: Tensor, ints: Tensor) -> None:
    """Count elements whose bits did not change despite an intended update, and exponent(intended) - exponent(old)."""
    wanted = (step != 0) & step.isfinite()
    bits = _INTEGERS[old.element_size()]  # same size: a view as bytes refuses some strides of 1x1 convolutions
    same = old.view(bits) == new.view(bits)
    ints[at.UNCHANGED] += (same & wanted).sum()
    step_key, weight_key = exponent_key(step.to(torch.float64)), exponent_key(old.to(torch.float64))
    relative = (step_key - weight_key).clamp_(at.REL_MIN, at.REL_MAX) - at.REL_MIN
    relative.masked_fill_(~wanted | (weight_key == 0) | ~old.to(torch.float64).isfinite(), at.REL_BINS)
    count_into(ints[at.REL : at.REL + at.REL_WIDTH], relative)
