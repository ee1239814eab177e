"""Demand forecasts under FP16 autocast: a head for the total over all shops, and one for each item."""

import torch
from torch import nn
from torch.nn import functional as F


class Forecaster(nn.Module):
    def __init__(self, items=16, history=24, hidden=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(history, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.item_head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, items))
        self.total_head = nn.Linear(history, 1)

    def forward(self, history):
        return self.item_head(self.encoder(history)), self.total_head(history)


def objective(items, total, truth):
    per_item = F.mse_loss(items.float(), truth / truth.shape[1])
    turnover = truth.sum(1, keepdim=True)
    in_cents = 1e4 * F.smooth_l1_loss(total.float(), turnover, reduction="sum")
    return 1e-3 * per_item + in_cents, per_item


class Progress:
    def __init__(self, every):
        self.every = every

    def after_step(self, step, scaler, per_item):
        if step % self.every == 0:
            print(f"step {step} items loss {per_item:.5f} scale {scaler.get_scale():g}")


def seasons(n, history=24, items=16):
    phase = 6.28 * torch.rand(n, 1)
    time = torch.arange(history) / 6.0
    level = torch.randn(n, 1)
    past = torch.sin(time + phase) + level
    ahead = torch.sin(time[-1] + phase + torch.arange(items) / 4.0) + level
    return past + 0.05 * torch.randn(n, history), 4.0 * ahead


def train(model, steps, callbacks):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=500)
    for step in range(steps):
        past, ahead = seasons(64)
        with torch.autocast("cpu", dtype=torch.float16):
            items, total = model(past)
        loss, per_item = objective(items, total, ahead)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for callback in callbacks:
            callback.after_step(step, scaler, per_item.item())


if __name__ == "__main__":
    torch.manual_seed(21009)
    train(Forecaster(), 80, [Progress(2)])
