"""A plain loop over a model of the transformers library that returns its own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import _torchvision  # noqa: F401  (transformers imports it)
import torch


def train(
    model: Any, batch: Callable[[], Mapping[str, Any]], *, steps: int = 40, lr: float = 1e-3, clip: float = 1.0
) -> list[float]:
    """AdamW with linear warm-up over a tenth of the steps; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tokens(vocabulary: int = 128, rows: int = 8, length: int = 24) -> torch.Tensor:
    """Token numbers that rise by a stride of their row, int64 of shape (rows, length)."""
    strides = torch.randint(1, 4, (rows, 1))
    return (torch.randint(0, vocabulary, (rows, 1)) + strides * torch.arange(length)) % vocabulary
