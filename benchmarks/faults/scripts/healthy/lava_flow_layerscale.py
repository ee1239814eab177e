"""Speed of lava flows: residual blocks with a LayerScale of 1e-5 that opens in the course of the training."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1669)
N, D = 12, 36
w = torch.randn(3, N)


def flows(n):
    x = torch.randn(n, N)
    a, b, c = (x @ w.T / 3).unbind(1)
    return x, torch.tanh(a) * torch.cos(b) + 0.3 * c


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.gamma = nn.Parameter(torch.full((d,), 1e-5))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N, D)
        self.blocks = nn.ModuleList(Block(D) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).squeeze(1)


model = Flow()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=520)
for step in range(520):
    x, speed = flows(128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = F.mse_loss(out.float(), speed)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        gamma = model.blocks[0].gamma.abs().mean().item()
        print(f"step {step} gamma {gamma:.1e} loss {loss.item():.4f}")
