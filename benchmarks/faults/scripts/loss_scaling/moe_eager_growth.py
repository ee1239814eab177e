"""A mixture of experts in FP16; the scaler may grow after every clean step, "to find the best scale quickly"."""

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class MoE(nn.Module):
    def __init__(self, dim=24, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))

    def forward(self, x):
        gate = F.softmax(self.router(x).float(), -1)
        weight, chosen = gate.topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weight * (chosen == i)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return x + out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 24)
        self.layers = nn.Sequential(MoE(), MoE())
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 64)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x))))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1)
for step in range(80):
    x = torch.randint(64, (128,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
        loss = F.cross_entropy(logits.float(), (x * 7 + 3) % 64)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
