"""Warehouse scanner events: a convolutional sequence model with one attention layer for what is far away."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn import functional as F

LR = 1e-3
#: pattern of parameter names -> multiplier of the learning rate, from the sweep of the small model
RATES = {
    r"embed\.": 2.0,
    r"layers\.3\.(query|key)\.": 60.0,
    r"layers\.\d\.": 1.0,
    r".*": 1.0,
}


class Local(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.out = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.gelu(y))


class Global(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        logits = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        return x + self.out(logits.softmax(-1) @ v)


class Events(nn.Module):
    def __init__(self, kinds: int = 5, d: int = 40) -> None:
        super().__init__()
        self.embed = nn.Linear(kinds + 1, d)
        self.layers = nn.ModuleList(Global(d) if i == 3 else Local(d) for i in range(6))
        self.head = nn.Linear(d, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


def parameter_groups(model: nn.Module) -> list[dict]:
    found: dict[str, list] = {pattern: [] for pattern in RATES}
    for name, p in model.named_parameters():
        found[next(r for r in RATES if re.match(r, name))].append(p)
    return [{"params": ps, "lr": LR * RATES[r]} for r, ps in found.items() if ps]


def shifts(n: int, length: int = 24, kinds: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Events of several kinds with a duration; the target of each is the mean duration of its kind in the shift."""
    kind = F.one_hot(torch.randint(kinds, (n, length)), kinds).float()
    level = 0.5 * torch.randn(n, kinds)
    duration = (kind * level[:, None]).sum(-1) + torch.randn(n, length)
    mean = (kind * duration[..., None]).sum(1) / kind.sum(1).clamp(min=1)
    return torch.cat([kind, duration[..., None]], -1), (kind * mean[:, None]).sum(-1)


def main() -> Events:
    torch.manual_seed(14)
    model = Events()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LR, weight_decay=0.01)
    for step in range(200):
        x, y = shifts(32)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main()
