"""Plans deliveries with a switch layer: one of eight experts per parcel, capacity, dropped parcels, router in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SwitchFFN(nn.Module):
    def __init__(self, dim=32, experts=8):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(experts)
        )
        nn.init.normal_(self.router.weight, std=0.02)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            probs = self.router(x.float()).softmax(-1)
        gate, choice = probs.max(-1)
        capacity = int(1.25 * len(x) / len(self.experts))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)[:capacity]
            if len(rows):
                y = y.index_add(0, rows, (gate[rows, None] * expert(x[rows])).to(y.dtype))
        share = F.one_hot(choice, len(self.experts)).float().mean(0)
        return y, len(self.experts) * (share * probs.mean(0)).sum()


class DepotNet(nn.Module):
    def __init__(self, features=12, dim=32):
        super().__init__()
        self.inp, self.norm, self.moe = nn.Linear(features, dim), nn.LayerNorm(dim), SwitchFFN(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.inp(x)
        y, balance = self.moe(self.norm(h).to(h.dtype))
        return self.out(h + y).squeeze(1), balance


def parcels(n):
    x = torch.randn(n, 12)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    return x, (x[:, 2:6] * tariffs[region]).sum(1) + 0.5 * region.float()


torch.manual_seed(2101)
tariffs = torch.randn(4, 4)
model = DepotNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(160):
    x, y = parcels(128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred, balance = model(x)
    loss = F.mse_loss(pred.float(), y) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
