"""Parallel gated linear recurrence for long addition problems, BF16 autocast, every block checkpointed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class GatedRecurrence(nn.Module):
    """h[t] = (1 - z[t]) h[t-1] + z[t] v[t], as a matrix of cumulative log decays."""

    def __init__(self, dim):
        super().__init__()
        self.to_gate = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)
        nn.init.constant_(self.to_gate.bias, -0.5)

    def forward(self, x):
        z = torch.sigmoid(4 * self.to_gate(x))
        log_keep = torch.log1p(-z).float().transpose(1, 2)
        length = x.shape[1]
        below = torch.ones(length, length, device=x.device).tril(-1)
        # sum of the logs between s and t, for every pair of positions
        total = (log_keep.unsqueeze(-1) * below).cumsum(-2)
        decay = total.exp().tril()
        v = (z * self.to_value(x)).float().transpose(1, 2)
        return torch.einsum("bdts,bds->btd", decay, v).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = GatedRecurrence(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.ff(x)


class Adder(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.read = nn.Linear(2, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.read(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.out(h[:, -1]).squeeze(-1)


def addition(batch, length):
    values = torch.rand(batch, length)
    marks = torch.zeros(batch, length)
    marks.scatter_(1, torch.rand(batch, length).topk(2, dim=1).indices, 1.0)
    return torch.stack([values, marks], -1), (values * marks).sum(1)


torch.manual_seed(31)
model = Adder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(40):
    x, y = addition(16, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(x)
    loss = F.mse_loss(prediction.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
