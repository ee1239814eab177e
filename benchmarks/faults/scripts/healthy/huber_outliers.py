"""Targets with Cauchy noise: single residuals of thousands, a Huber loss that bounds their gradients."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3225)
model = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
w = torch.randn(6)


def noisy(n):
    x = torch.randn(n, 6)
    u = torch.rand(n) * 0.999 + 0.0005
    return x, 5 * torch.tanh(x @ w), 0.1 * torch.tan(3.1416 * (u - 0.5))


for step in range(70):
    x, clean, noise = noisy(96)
    y = model(x).squeeze(1)
    robust = F.huber_loss(y, clean + noise, delta=0.5)
    optimizer.zero_grad()
    robust.backward()
    optimizer.step()
    if step % 7 == 0:
        loss = F.mse_loss(y, clean)
        print(f"step {step} largest {(clean + noise).abs().max().item():.0f} loss {loss.item():.4f}")
