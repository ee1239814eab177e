"""The CPU kernel in torch ops: the reference's results at a tenth of its cost, for FP32 and everything narrower.

A chunk of 64 Ki elements is widened to FP32 and classified as 32-bit integers in reused buffers, so nothing larger than
a core's L2 cache is allocated and no page is faulted in twice. Rare content (NaN, Inf, FP32 subnormals, sums that would
leave FP32's range) is detected from the chunk's own histogram and extremes; the reference then measures that chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from precdoctor.numerics import EXP_MIN
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at

CHUNK = 64 * 1024

_FIELD = 23  # FP32 mantissa bits
_BIAS = 127
#: FP32 exponent fields run 0 .. 255; entry ``1 + field`` of a chunk's histogram, 0 for zeros.
_KEYS = 257
#: Offset from the key of a chunk's histogram to the key of the slot's.
_SHIFT = -_BIAS - EXP_MIN
#: Chunk sums are taken in FP32 and promoted; squares of magnitudes in this range stay well inside FP32's.
_SAFE_AMAX, _SAFE_AMIN = 2.0**54, 2.0**-50

_scratch = threading.local()


class _Buffers:
    """Four 32-bit planes of one chunk, reused by one thread."""

    def __init__(self) -> None:
        self.wide = torch.empty(CHUNK, dtype=torch.float32)
        self.bits = torch.empty(CHUNK, dtype=torch.int32)
        self.key = torch.empty(CHUNK, dtype=torch.int32)
        self.spare = torch.empty(CHUNK, dtype=torch.int32)
        self.index = torch.arange(1, CHUNK + 1, dtype=torch.int32).mul_(reference.signed32(reference.GOLDEN))


def _buffers() -> _Buffers:
    if not hasattr(_scratch, "buffers"):
        _scratch.buffers = _Buffers()
    found: _Buffers = _scratch.buffers
    return found


def measure(x: Tensor, ints: Tensor, floats: Tensor, counter: Tensor, blocks: Sequence[int]) -> None:
    """:func:`~precdoctor.recording.kernels.reference.measure` on the CPU, for every dtype but FP64."""
    buffers = _buffers()
    counter += 1
    bad = 0
    finfo = torch.finfo(x.dtype)
    reference.seed_fingerprint(x, ints)
    for start, piece in reference.chunks(x, CHUNK):
        if not _accumulate(piece, start, ints, floats, finfo, blocks, buffers):
            bad += int(reference.measure_piece(piece, start, ints, floats, blocks))
    reference.finish(x, ints, counter, torch.tensor(bad))


def _accumulate(
    piece: Tensor, start: int, ints: Tensor, floats: Tensor, finfo: torch.finfo, blocks: Sequence[int], b: _Buffers
) -> bool:
    """Accumulate one chunk of ordinary content. Return False, with nothing accumulated, if it holds rare content."""
    n = piece.numel()
    flat = piece.reshape(-1)
    wide = flat if flat.dtype == torch.float32 else b.wide[:n].copy_(flat)
    bits, key, spare = b.bits[:n], b.key[:n], b.spare[:n]
    torch.bitwise_and(wide.view(torch.int32), 0x7FFF_FFFF, out=bits)
    torch.sub(bits, 1, out=spare)
    torch.bitwise_right_shift(spare, _FIELD, out=key)
    key += 1
    top = int(bits.max())
    low = int(spare.bitwise_and_(0x7FFF_FFFF).min()) + 1
    hist = torch.bincount(key, minlength=_KEYS)
    if top == 0:
        ints[at.HIST] += n
        torch.clamp_(floats[at.AMAX], min=0.0)
    else:
        amax, amin = _value(top), _value(low)
        if top >= 0x7F80_0000 or amin < 2.0**-126 or amax > _SAFE_AMAX or amax < _SAFE_AMIN:
            return False
        ints[at.HIST] += hist[0]
        ints[at.HIST + _SHIFT + 1 : at.HIST + _SHIFT + _KEYS] += hist[1:]
        floats[at.AMAX].clamp_(min=amax)
        floats[at.AMIN].clamp_(max=amin)
        floats[at.SUM] += wide.sum().double()
        floats[at.SUM_SQ] += torch.dot(wide, wide).double()
        if amax >= finfo.max:
            ints[at.AT_MAX] += (bits == top).sum()
        if amin < finfo.smallest_normal:
            ints[at.SUBNORMAL] += (wide.abs() < finfo.smallest_normal).sum() - hist[0]
    for block in blocks:
        _accumulate_blocks(key.view(piece.shape), int(hist[0]), ints, block)
    ints[at.FINGERPRINT] += _fingerprint(flat, start, b, key, spare)
    return True


def _value(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def _accumulate_blocks(key: Tensor, zeros: int, ints: Tensor, block: int) -> None:
    """Histogram blocks as the reference does, but subtract elements that have no exponent instead of masking them."""
    pad = -key.shape[1] % block
    grouped = (torch.nn.functional.pad(key, (0, pad)) if pad else key).view(key.shape[0], -1, block)
    peak = grouped.amax(dim=-1, keepdim=True)
    blocks_by_peak = torch.bincount(peak.flatten(), minlength=_KEYS)
    below = (peak - grouped).clamp_(max=at.BLOCK_BINS - 1)
    first = at.block_hist(block)
    if int(blocks_by_peak[1 : at.BLOCK_BINS].sum()):  # zeros would not all fall into the last bin
        below.masked_fill_(grouped == 0, at.BLOCK_BINS)
        ints[first : first + at.BLOCK_WIDTH] += torch.bincount(below.flatten(), minlength=at.BLOCK_WIDTH)
    else:
        hist = torch.bincount(below.flatten(), minlength=at.BLOCK_BINS)
        in_zero_blocks = int(blocks_by_peak[0]) * block
        hist[0] -= in_zero_blocks
        hist[at.BLOCK_BINS - 1] -= zeros + pad * key.shape[0] - in_zero_blocks
        ints[first : first + at.BLOCK_BINS] += hist
    first = at.block_amax(block)
    ints[first] += blocks_by_peak[0]
    ints[first + _SHIFT + 1 : first + _SHIFT + _KEYS] += blocks_by_peak[1:]


def _fingerprint(flat: Tensor, start: int, b: _Buffers, a: Tensor, c: Tensor) -> Tensor:
    """Return the reference's fingerprint of one chunk; overwrites the planes ``a`` and ``c``."""
    size = flat.element_size()
    if size == 4:
        words = flat.view(torch.int32)
    else:
        words = flat.view(torch.int8 if size == 1 else torch.int16)
        words = a.copy_(words).bitwise_and_(0xFF if size == 1 else 0xFFFF)
    torch.add(words, b.index[: flat.numel()], out=a)
    a += reference.signed32(start * reference.GOLDEN)
    return reference.mix_words(a, c)
