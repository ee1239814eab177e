"""Adam's update in terms of its moments, so that a kernel can compute it instead of reading a stored update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adam:
    """``first * factor / (sqrt(second) / root + eps) - before * decay``, each operation rounded to FP32.

    The arithmetic of ``torch.optim.Adam`` and ``AdamW``, with the moments after the step; in FP64 if the moments are.

    Attributes:
        first, second: the moments, dense, of the weight's shape.
        factor: -lr / (1 - beta1**t); a tensor if the rate or the step count is on a device, which is not waited for.
        root: sqrt(1 - beta2**t); likewise.
        decay: lr * weight_decay of AdamW; None without decay.
    """

    first: Tensor
    second: Tensor
    factor: float | Tensor
    root: float | Tensor
    eps: float
    decay: float | Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return self.first.shape

    def part(self, take: Callable[[Tensor], Tensor]) -> Adam:
        """Return the update of a part of the weight; ``take`` returns that part of any tensor of the weight's shape."""
        return replace(self, first=take(self.first), second=take(self.second))

    def update(self, before: Tensor) -> Tensor:
        """Return the update of a weight that was ``before``; FP32 or FP64, of its shape."""
        # In place on temporaries: on a CPU a new tensor costs more, in page faults, than the arithmetic.
        denominator = wide(self.second).sqrt().div_(self.root).add_(self.eps)
        update = wide(self.first).mul(self.factor).div_(denominator)
        if self.decay is not None:
            update.sub_(torch.mul(wide(before), self.decay, out=denominator))
        return update


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in FP32; FP64 stays FP64."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
