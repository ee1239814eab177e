"""The facts of a sample of logits: their magnitudes, the largest of each head, and how sharp the softmax is.

Functions of tensors alone, called without autograd. Masked positions are left out everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Logits at or below this value are masked: by -inf, ``finfo.min``, -1e9, or BERT's -10000 plus the score.
MASKED = -9000.0
#: Query positions read per head; more only if all of them together have fewer than ``_SMALL`` elements.
ROWS = 64
_SMALL = 1 << 15
#: Maximum elements of a sample, and of keys that are converted to FP32 for it.
_MOST = 1 << 19
_KEYS = 1 << 22
#: Maximum number of heads that get numbers of their own.
MAX_HEADS = 128


class Sampled(NamedTuple):
    """Logits of some rows.

    Attributes:
        values: batch x heads x rows x keys, FP32, -inf where masked.
        heads: number of heads; 0 if the shape does not show it, or if it is 1 or above :data:`MAX_HEADS`.
    """

    values: Tensor
    heads: int


@dataclass(slots=True)
class Sharpness:
    """The facts of a row of kind ``logits`` besides its magnitudes; the numbers may still be on their way to the host.

    Attributes:
        role: what the softmax is for.
        heads: number of heads with numbers of their own; 1 if all heads are taken together.
        numbers: returns the mean entropy (nats), then the largest logit of each head, then per head the entropy as a
            share of the logarithm of the number of keys.
    """

    role: str
    heads: int
    numbers: Callable[[], list[float]]


def strided(size: int, most: int) -> slice:
    """Return a slice of at most ``most`` of ``size`` positions, evenly spread, that includes the last one."""
    step = max(1, math.ceil(size / max(1, most)))
    return slice((size - 1) % step, None, step)


def of_scores(x: Tensor, dim: int, heads: int) -> Sampled | None:
    """Sample the input of a softmax along ``dim``; None if it is empty or has fewer than two keys.

    Args:
        x: floating-point, dense, any shape.
        dim: the dimension of the softmax.
        heads: number of heads of the module, if known, else 0: the first of three dimensions is often batch times
            heads.
    """
    if x.dim() == 0 or x.numel() == 0:
        return None
    x = x.movedim(dim, -1)
    keys = x.shape[-1]
    if keys < 2:
        return None
    if x.dim() == 4:  # batch x heads x queries x keys
        known = x.shape[1]
    elif x.dim() == 3 and heads > 1 and x.shape[0] % heads == 0:
        x, known = x.unflatten(0, (-1, heads)), heads
    else:
        # More than four dimensions cannot be flattened without a copy, so only index 0 of the leading ones is read.
        known = 0
        x = x.reshape(1, 1, 1, keys) if x.dim() == 1 else x
        while x.dim() > 4:
            x = x[tuple([0] * (x.dim() - 4))]
        x = x[None, None] if x.dim() == 2 else x[:, None] if x.dim() == 3 else x
    b, h, q, _ = x.shape
    rows = min(max(ROWS, _SMALL // (h * keys)), max(1, _MOST // (h * keys)))
    batch = min(b, max(1, math.isqrt(rows)) if q > 1 else rows)
    x = x[strided(b, batch), :, strided(q, max(1, rows // batch))].float()
    return Sampled(x.masked_fill(x <= MASKED, -math.inf), known if 1 < known <= MAX_HEADS else 0)


def of_attention(
    query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Sampled | None:
    """Compute the logits of some query positions, because fused attention does not store them; None if unsupported.

    Args:
        query, key: batch x heads x positions x width; there may be fewer heads of keys (grouped queries).
        mask: boolean (true: not masked) or added to the logits, broadcast to batch x heads x queries x keys.
        causal: position ``i`` sees keys up to ``i``.
        scale: None: the inverse square root of the width.
    """
    if query.dim() == 3:
        query, key = query[:, None], key[:, None]
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    if query.dim() != 4 or key.dim() != 4 or query.numel() == 0 or key.shape[2] < 2:
        return None
    (b, h, q, width), keys = query.shape, key.shape[2]
    if h % key.shape[1] or b != key.shape[0]:
        return None
    rows = min(ROWS, max(1, _MOST // (h * keys)))
    batch = min(b, max(1, min(math.isqrt(rows), _KEYS // (h * keys * width))))
    some, places = strided(b, batch), strided(q, max(1, rows // batch))
    query, key = query[some, :, places], key[some]
    if key.numel() <= _KEYS:
        query, key = query.float(), key.float()
    if h != key.shape[1]:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    x = torch.matmul(query * factor, key.transpose(-1, -2)).float()
    if mask is not None:
        mask = mask.expand(b, h, q, keys)[some, :, places]
        x = x.masked_fill(mask.logical_not(), -math.inf) if mask.dtype is torch.bool else x + mask.float()
    if causal:
        at = torch.arange(q, device=x.device)[places]
        x = x.masked_fill(torch.arange(keys, device=x.device)[None, :] > at[:, None], -math.inf)
    return Sampled(x.masked_fill(x <= MASKED, -math.inf), h if 1 < h <= MAX_HEADS else 0)


def sharpness(sample: Sampled) -> Tensor:
    """Return the numbers of :class:`Sharpness` as one FP32 vector on the sample's device.

    NaN for a head without a row of at least two keys.
    """
    x = sample.values
    x = x if sample.heads else x.transpose(1, 2).reshape(x.shape[0], 1, -1, x.shape[-1])
    keys = (x > -math.inf).sum(-1)
    several = keys > 1
    entropy = torch.special.entr(torch.softmax(x, -1)).sum(-1).masked_fill(~several, 0.0)
    share = entropy / keys.clamp(min=2).log()
    rows = several.sum((0, 2))
    heads = share.sum((0, 2)) / rows
    return torch.cat([(entropy.sum() / rows.sum())[None], x.amax((0, 2, 3)), heads])
