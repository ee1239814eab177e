"""The model, the data and the faults that the trainings of every stack share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, CLASSES, BATCH, STEPS = 32, 64, 8, 32, 12
#: The step at which what goes wrong at one moment does, and the rank on which it does.
FAULT, RANK = 5, 1
#: What a loss is multiplied by so that gradients leave the range of FP16 without a scale.
TINY = 2.0**-20


class Net(nn.Module):
    """A layer, a residual block of two experts that take a row each by its sign, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (rows, CLASSES), of x, (rows, WIDTH)."""
        first = (x[:, :1] > 0).to(x.dtype)
        h = self.norm(nn.functional.gelu(self.up(x)))
        chosen = [share * expert(h * share) for share, expert in zip((first, 1 - first), self.experts, strict=True)]
        return self.head(h + nn.functional.gelu(sum(chosen)))


def net(faults: set[str]) -> Net:
    """The same on every rank; with ``expert`` FP16 overflows in the second expert as soon as it gets a row."""
    torch.manual_seed(0)
    made = Net()
    if "expert" in faults:
        with torch.no_grad():
            made.experts[1].weight.mul_(2e5)
    return made


def batch(step: int, reads: int, faults: set[str]) -> tuple[Tensor, Tensor]:
    """Rows, (BATCH, WIDTH), and their classes.

    Args:
        step: of the training.
        reads: number of the part of the data.
        faults: with ``nan`` one element of one rank is NaN at one step; with ``expert`` only that rank has rows for the
            second expert, from that step on.
    """
    draws = torch.Generator().manual_seed(1000 * step + reads)
    x = torch.randn(BATCH, WIDTH, generator=draws)
    y = (x @ torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(7))).argmax(-1)
    if "nan" in faults and (step, reads) == (FAULT, RANK):
        x[3, 3] = torch.nan
    if "expert" in faults and (reads != RANK or step < FAULT):
        x[:, 0].abs_()
    return x, y


def loss_of(logits: Tensor, classes: Tensor, faults: set[str]) -> Tensor:
    """The loss; with ``low`` so small that FP16 gradients need a scale."""
    loss = nn.functional.cross_entropy(logits.float(), classes)
    return loss * TINY if "low" in faults else loss


def go_wrong(model: nn.Module, step: int, rank: int, faults: set[str]) -> None:
    """Before a step; with ``drift`` one rank changes a weight by itself, from one step on."""
    if "drift" in faults and step >= FAULT and rank == RANK:
        weight = next(p for name, p in model.named_parameters() if name.endswith("experts.1.weight"))
        with torch.no_grad():
            weight.data.view(-1)[:8].add_(0.5)


def digest(losses: Iterable[float], weights: Iterable[Tensor]) -> str:
    """Of the bits of a training's losses and final weights."""
    found = hashlib.sha256(" ".join(x.hex() for x in losses).encode())
    for weight in weights:
        if weight.numel():
            found.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
