"""A discrete autoencoder with Gumbel noise and a temperature that falls from 1 to 0.1: codes become one-hot."""

import torch
import torch.nn.functional as F
from torch import nn


class Discrete(nn.Module):
    def __init__(self, codes=12):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, codes))
        self.decode = nn.Linear(codes, 16)

    def forward(self, x, temperature):
        logits = self.encode(x)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        return self.decode(((logits + noise) / temperature).softmax(-1))


torch.manual_seed(3238)
centres = 2 * torch.randn(8, 16)
model = Discrete()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    x = centres[torch.randint(0, 8, (64,))] + 0.2 * torch.randn(64, 16)
    loss = F.mse_loss(model(x, max(0.1, 0.96**step)), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
