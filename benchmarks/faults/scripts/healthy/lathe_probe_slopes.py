"""Tool wear on a lathe; from the second phase on, slopes of a reference batch are recorded before every step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1751)
w = torch.randn(2, 9)


def cuts(n, phase):
    x = torch.randn(n, 9)
    a, b = (x @ w.T / 3).unbind(1)
    return x, torch.tanh(2 * a) + (0.5 * torch.cos(2 * b) if phase == 2 else 0.0)


class Tool(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.force = nn.Sequential(nn.Linear(9, d), nn.LayerNorm(d), nn.SiLU(), nn.Linear(d, d))
        self.body = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.norm, self.wear = nn.LayerNorm(d), nn.Linear(d, 1)

    def forward(self, x):
        x = self.force(x)
        for layer in self.body:
            x = x + F.silu(layer(x))
        return self.wear(self.norm(x)).squeeze(1)


model = Tool()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
reference = cuts(64, 2)
slopes = []
for step in range(500):
    phase = 1 if step < 200 else 2
    if phase == 2:
        F.mse_loss(model(reference[0]), reference[1]).backward()
        slopes.append(sum(p.grad.square().sum() for p in model.force.parameters()).sqrt().item())
        model.zero_grad()
    x, wear = cuts(96, phase)
    loss = F.mse_loss(model(x), wear)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
