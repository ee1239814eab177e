"""Demand for spare parts: a large table of parts, most of them rarely asked for, in half precision with loss scaling."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(909)
PARTS = 600
popularity = 1.0 / (1 + torch.arange(PARTS)).float()
effect, w = torch.randn(PARTS), torch.randn(6)


def orders(n):
    part = torch.multinomial(popularity, n, replacement=True)
    x = torch.randn(n, 6)
    return part, x, effect[part] + torch.tanh(x @ w)


class Demand(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.part = nn.Embedding(PARTS, d)
        self.context = nn.Linear(6, d)
        self.wide = nn.Linear(2 * d, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(2))
        self.out = nn.Linear(96, 1)
        nn.init.constant_(self.wide.bias, -0.4)  # few units per part

    def forward(self, part, x):
        h = F.relu(self.wide(torch.cat([self.part(part), self.context(x)], 1)))
        for norm, layer in zip(self.norms, self.layers):
            h = h + F.relu(layer(norm(h)))
        return self.out(h).squeeze(1)


model = Demand()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=300)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [250, 400], gamma=0.3)
for step in range(500):
    part, x, demand = orders(96)
    with torch.autocast("cpu", torch.float16):
        out = model(part, x)
    loss = F.mse_loss(out.float(), demand)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
