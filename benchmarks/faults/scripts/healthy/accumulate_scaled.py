"""FP16 autocast, loss scaler, accumulation over four micro-batches, clipping after unscale: all in the right order."""

import torch
from torch import nn

MICRO = 4


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.f(x)


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), Residual(32), Residual(32), nn.Linear(32, 6))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
    rule = torch.randn(12, 6)
    for step in range(20):
        for _ in range(MICRO):
            x = torch.randn(16, 12)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(x), (x @ rule).argmax(1)) / MICRO
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"{step}: {loss.item() * MICRO:.3f} at scale {scaler.get_scale():g}")


if __name__ == "__main__":
    train()
