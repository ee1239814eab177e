"""Adam's update in terms of its moments, so that a kernel can make it where it is needed and nobody has to store it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adam:
    """``first * factor / (sqrt(second) / root + eps) - before * decay``, each operation rounded to FP32 (or FP64, if
    the moments are): the arithmetic of ``torch.optim.Adam`` and ``AdamW``, with the moments as a step has left them.

    Attributes:
        first, second: the moments, dense, of the weight's shape.
        factor: -lr / (1 - beta1**t); a tensor where the rate or the step lies on a device, and is not waited for.
        root: sqrt(1 - beta2**t); the same.
        eps: as the optimizer has it.
        decay: lr * weight_decay of AdamW; null without.
    """

    first: Tensor
    second: Tensor
    factor: float | Tensor
    root: float | Tensor
    eps: float
    decay: float | Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The weight's."""
        return self.first.shape

    def part(self, take: Callable[[Tensor], Tensor]) -> Adam:
        """The update of the part of a weight that ``take`` gives of a tensor of its shape."""
        return replace(self, first=take(self.first), second=take(self.second))

    def update(self, before: Tensor) -> Tensor:
        """The update of a weight that was ``before``; FP32 or FP64, of its shape."""
        # In place wherever the tensor is our own: on a CPU a new one costs more, in page faults, than the arithmetic.
        denominator = wide(self.second).sqrt().div_(self.root).add_(self.eps)
        update = wide(self.first).mul(self.factor).div_(denominator)
        if self.decay is not None:
            update.sub_(torch.mul(wide(before), self.decay, out=denominator))
        return update


def wide(x: Tensor) -> Tensor:
    """``x`` in FP32, or in FP64 if it is."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
