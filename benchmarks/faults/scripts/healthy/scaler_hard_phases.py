"""FP16 autocast, a GradScaler and four micro-batches a step; now and then a batch of hard examples overflows once."""

import torch
import torch.nn.functional as F
from torch import nn


class Energy(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.species = nn.Embedding(5, dim)
        self.gate = nn.Linear(8, dim)
        self.atom = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, z, r):
        basis = torch.exp(-((r.unsqueeze(-1) - torch.arange(8)) ** 2))
        return self.atom(self.species(z) + self.gate(basis)).squeeze(-1).sum(-1)


torch.manual_seed(64)
depth = torch.randn(5)
model = Energy()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=12)
for step in range(90):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(4):
        z, r = torch.randint(5, (16, 6)), torch.rand(16, 6) * 7
        y = (depth[z] * torch.cos(r)).sum(-1)
        if step % 30 == 17 and micro == 2:
            y = y * 40
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(z, r)
        loss = F.mse_loss(out.float(), y) / 4
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {total:.4f} scale {scaler.get_scale():g}")
