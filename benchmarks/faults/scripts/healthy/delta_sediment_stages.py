"""Sediment in a river delta, three surveys one after another; each has its own offset and relief."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1953)
surveys = [(0, 0.0, 1.0), (200, 6.0, 2.0), (380, -4.0, 1.5)]  # first step, offset, relief
w = torch.randn(2, 13)


def survey(n, offset, relief):
    x = torch.randn(n, 13)
    a, b = (x @ w.T / 4).unbind(1)
    return x, offset + relief * (torch.tanh(a) + 0.4 * torch.sin(2 * b))


class Sediment(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.inp = nn.Linear(13, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = self.inp(x)
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.silu(layer(norm(x)))
        return self.out(x).squeeze(1)


model = Sediment()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(600):
    start, offset, relief = [s for s in surveys if step >= s[0]][-1]
    for group in optimizer.param_groups:
        group["lr"] = 4e-3 * min(1.0, (step - start + 1) / 20)
    x, depth = survey(96, offset, relief)
    loss = F.mse_loss(model(x), depth)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}")
