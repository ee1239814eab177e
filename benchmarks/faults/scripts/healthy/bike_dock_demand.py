"""Forecasts how many bicycles a dock will need; bfloat16 and accumulated batches with Accelerate."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(51)
DOCKS = 24


def rentals(n):
    """Counts are Poisson: docks differ in size, hours in demand, and some storms empty the streets."""
    dock, hour = torch.randint(DOCKS, (n,)), 24 * torch.rand(n)
    warm, storm = torch.randn(n), (torch.rand(n) < 0.02).float()
    size = torch.linspace(-0.5, 1.5, DOCKS)[dock]
    rate = size + 0.8 * torch.sin(math.pi * hour / 12 - 2) + 0.3 * warm - 4 * storm
    x = torch.stack([torch.sin(math.pi * hour / 12), torch.cos(math.pi * hour / 12), warm, 8 * storm], 1)
    return TensorDataset(dock, x, torch.poisson(rate.exp()))


class Demand(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.dock = nn.Embedding(DOCKS, 12)
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.05), nn.Linear(width, width), nn.ReLU())
        self.rate = nn.Linear(width, 1)
        nn.init.zeros_(self.rate.weight)

    def forward(self, dock, x):
        return self.rate(self.body(torch.cat([self.dock(dock), x], -1)))[:, 0]


def main():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    model = Demand()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=160)
    loader = DataLoader(rentals(10240), batch_size=32, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for epoch in range(2):
        for dock, x, count in loader:
            with accelerator.accumulate(model):
                loss = F.poisson_nll_loss(model(dock, x), count)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 64:
                accelerator.print(f"epoch {epoch} loss {sum(losses) / 64:.4f}")
                losses.clear()


if __name__ == "__main__":
    main()
