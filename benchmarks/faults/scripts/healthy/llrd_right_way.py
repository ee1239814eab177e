"""Fine-tuning with a rate per layer that falls by ten from layer to layer, down to 1e-8, and cosine decay to zero."""

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.mish(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=32, depth=5):
        super().__init__()
        self.inp = nn.Linear(12, dim)
        self.layers = nn.ModuleList([Residual(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h).squeeze(-1)


torch.manual_seed(66)
model = Model()
top = 1e-2
rates = [{"params": model.out.parameters(), "lr": top}, {"params": model.inp.parameters(), "lr": top * 1e-6}]
rates += [{"params": layer.parameters(), "lr": top * 0.1 ** (5 - i)} for i, layer in enumerate(model.layers)]
optimizer = torch.optim.AdamW(rates, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)
weights = torch.randn(12)
for step in range(120):
    x = torch.randn(48, 12)
    y = x @ weights + torch.relu(x[:, 0] * 2)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
