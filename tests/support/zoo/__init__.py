"""Small deterministic training scripts, written as a user would write them.

Each specimen is a function that seeds, trains for a few steps, and returns its losses and models. ``python -m
tests.support.zoo NAME ...`` trains the named ones, each in a fork of its own (torch is imported once), and prints one
JSON line with a digest of the losses and final weights for each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


@dataclasses.dataclass
class Trained:
    """What a specimen ends with."""

    losses: list[float]
    models: list[nn.Module]

    def digest(self) -> str:
        """Every loss and every bit of the final state."""
        mix = hashlib.sha256(repr(self.losses).encode())
        for model in self.models:
            for name, value in model.state_dict().items():
                mix.update(name.encode())
                mix.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return mix.hexdigest()


SPECIMENS: dict[str, Callable[[], Trained]] = {}


def specimen(train: Callable[[], Trained]) -> Callable[[], Trained]:
    """Put a function into the zoo under its own name."""
    SPECIMENS[train.__name__] = train
    return train


def specimen_if(possible: bool) -> Callable[[Callable[[], Trained]], Callable[[], Trained]]:
    """Put a function into the zoo if this torch can run it."""
    return specimen if possible else lambda train: train


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    *,
    steps: int = 3,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    before_step: Callable[[int], None] | None = None,
) -> list[float]:
    """The loop most scripts have; returns the losses."""
    losses = []
    for step in range(steps):
        total = 0.0
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of() / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.item()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if before_step is not None:
            before_step(step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def load(names: Iterable[str]) -> list[Callable[[], Trained]]:
    """The specimens with these names; for none, all but those of libraries, which stand in modules of their own."""
    names = list(names)
    for name in names:
        if (library := name.partition("_")[0]) in ("torchao", "te", "msamp", "sharded"):
            importlib.import_module(f"tests.support.zoo.lib_{library}")
    from tests.support.zoo import (  # noqa: F401 - register
        adversarial,
        healthy,
        language,
        narrow,
        oddities,
        sequences,
        skipping,
        vision,
    )

    return [SPECIMENS[name] for name in (names or SPECIMENS)]
